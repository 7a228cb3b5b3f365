"""A function of each token's divergences, of two heads over ranks; run on every rank by test_linear_parallel.py."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distillation_cases import heads_of, leaves
from helpers import over_ranks
from helpers.divergence_oracle import divergences, rounded
from linear_log_prob_cases import close, gradients_close
from vocab_parallel_cases import Collectives, V, same_bits_everywhere, split

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CAPS = {"temperature": 2.0, "softcap": 30.0, "teacher_softcap": 20.0, "logit_scale": 0.75, "beta": 0.25}


def smooth(d):
    """Without the overlap, whose gradient follows the rounding of 16-bit logits."""
    return d.kl + 2 * d.reverse_kl * d.jsd - 0.5 * d.log_prob + d.agrees


def every(d, weight):
    share = (-3.0 * d.overlap.detach()).exp()
    return weight * (share * d.kl + (1 - share) * (1 - d.overlap)) + d.jsd * d.coverage * (1 + d.agrees) * d.covers_top


def call(student, teacher, fn, kind="chunk", **options):
    (x, w, b), (y, u, c) = student, teacher
    class_start = None if kind == "chunk" else split(kind, V)[0]
    given = {"num_classes": V, "class_start": class_start, "linear_bias": b, "teacher_bias": c, **options}
    return over_ranks.linear_distillation_token_loss(x, w, y, u, fn, **given)


def one(device, kind, problem, fn, sequence_dim=None, rows=(), logits_dtype=None, **options):
    student, teacher, target = problem
    given, own = leaves(device, kind, (student, teacher), sequence_dim), student[0].dtype
    more = {"rows": tuple(row.to(device) for row in rows), "logits_dtype": logits_dtype, **options}
    if target is not None:
        more["target"] = target.to(device)
    loss = call(*given, fn, kind, sequence_parallel=sequence_dim is not None, **more)
    same_bits_everywhere(loss)
    whole = [tensor.double().requires_grad_() for tensor in student]
    of_logits = logits_dtype or torch.promote_types(own, torch.float32)
    logits = [rounded(F.linear(*head), of_logits) for head in (whole, [t.double() for t in teacher])]
    of_oracle = {name: value for name, value in options.items() if name in CAPS}
    values = fn(divergences(*logits, target, **of_oracle), *[row.double() for row in rows])
    counted = torch.ones_like(values, dtype=torch.bool) if target is None else target != -100
    wanted = torch.where(counted, values, 0.0).sum()
    wanted = wanted / (options.get("divisor", 1.0) if options.get("reduction") == "sum" else counted.sum())
    grads = torch.autograd.grad(wanted, whole)
    close(loss, wanted.detach(), own)
    gradients_close(torch.autograd.grad(loss, given[0]), grads, kind, own, sequence_dim)
    with torch.no_grad():
        again = call(*given, fn, kind, sequence_parallel=sequence_dim is not None, **more)
    torch.testing.assert_close(again, loss.detach())


def values(device, kind):
    for dtype in DTYPES:
        one(device, kind, heads_of(dtype), smooth, chunk_rows=4, **CAPS)
    problem = heads_of(torch.float32)
    weight = torch.rand((2, 5), generator=torch.Generator().manual_seed(2))
    for options in ({}, CAPS, {"reduction": "sum", "divisor": 3.0, "chunk_rows": 3}):
        one(device, kind, problem, every, rows=(weight,), **options)
    for fn in (lambda d: 1 - d.overlap, lambda d: d.kl, lambda d: -d.log_prob):
        one(device, kind, problem, fn)
    one(device, kind, (*problem[:2], None), lambda d: d.jsd + d.agrees, chunk_rows=4)
    one(device, kind, heads_of(torch.bfloat16), smooth, logits_dtype=torch.bfloat16)
    world = dist.get_world_size()
    for shape, dim in (((2 * world, 3), 0), ((3, 2 * world), 1)):
        of_rows = torch.rand(shape, generator=torch.Generator().manual_seed(2))
        one(device, kind, heads_of(torch.float32, shape), every, dim, rows=(of_rows,), chunk_rows=5)
        one(device, kind, (*heads_of(torch.float32, shape)[:2], None), every, dim, rows=(of_rows,))


def behaviour(device):
    """What is gathered for what fn reads; compiled; compared; refused."""
    world = dist.get_world_size()
    rows = 6 * world
    student, teacher, target = heads_of(torch.float32, (rows,))
    given, of_teacher = leaves(device, "chunk", (student, teacher))
    target, gather = target.to(device), "all_gather_into_tensor.default"

    def step(fn, x, w, b, **options):
        return call((x, w, b), of_teacher, fn, target=target, **options)

    for fn, first, second in (
        (lambda d: d.kl, 5, 0),
        (lambda d: d.kl + d.reverse_kl - d.log_prob, 7, 0),
        (lambda d: 1 - d.overlap, 4, 2),
        (lambda d: d.jsd + d.overlap * d.agrees, 8, 4),
    ):
        with Collectives() as mode:
            loss = step(fn, *given)
        seen = [number for name, number in mode.seen if name == gather]
        assert seen == [first * rows + 5, *([second * rows] if second else [])], seen
        if second:
            compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(fn, *given)
            torch.testing.assert_close(compiled, loss)
            grads = [torch.autograd.grad(value, given) for value in (compiled, loss)]
            torch.testing.assert_close(*grads)
        torch.testing.assert_close(step(fn, *given, check=True), loss)
    seen = []

    def keep(d):
        seen.append(torch.stack([field.detach() for field in d]))
        return d.kl

    step(keep, *given, chunk_rows=4)
    fields, ignored = torch.cat(seen[1:], 1), target == -100  # without the call on tokens of zeros
    assert ignored.any() and (fields[:, ignored] == 0).all() and (fields[5:, ~ignored] > 0).any()
    with pytest.raises(ValueError, match=r"rank 0: ValueError: fn reads log_prob"):
        call(given, of_teacher, lambda d: d.log_prob, check=True)
    with pytest.raises(ValueError, match=r"classes has shape \(3,\)"):
        step(smooth, *given, classes=torch.arange(3, device=device))
    with pytest.raises(ValueError, match="'none' is not a valid value for reduction"):
        step(smooth, *given, reduction="none")
    if world > 1:
        weight = torch.full((rows,), float(dist.get_rank()), device=device)
        with pytest.raises(ValueError, match=r"rows\[0\] differ between ranks"):
            step(every, *given, rows=(weight,), check=True)
        with pytest.raises(ValueError, match=r"temperature is 1\.0 on rank 0 but 2\.0 on rank 1"):
            step(smooth, *given, temperature=1.0 + (dist.get_rank() == 1), check=True)
        assert step(smooth, *given, class_start=0).isnan()


def draft_of(device, kind, classes, dtype=torch.float32, rows=(2, 5), sequence_dim=None):
    """(this rank's student, which has these of the teacher's classes, its teacher, keywords, the whole problem)."""
    (x, w, b), teacher, target = heads_of(dtype, rows)
    student, target = (x, w[classes], b[classes]), torch.where(target == -100, -100, target % len(classes))
    _, of_teacher = leaves(device, kind, (student, teacher), sequence_dim)
    start, size, _ = split(kind, V)
    mine, number = (classes >= start) & (classes < start + size), len(classes)
    x = x if sequence_dim is None else x.chunk(dist.get_world_size(), sequence_dim)[dist.get_rank()]
    own = [tensor.clone().to(device).requires_grad_() for tensor in (x, w[classes[mine]], b[classes[mine]])]
    place = {"num_classes": number, "class_start": int((classes < start).sum()), "classes": classes[mine] - start}
    moved = place | {"classes": place["classes"].to(device), "target": target.to(device)}
    return own, of_teacher, moved, (student, teacher, target)


def draft(device, kind, classes, fn, dtype=torch.float32, sequence_dim=None, rows=(2, 5), **options):
    """Against the float64 logits of one process."""
    own, of_teacher, more, problem = draft_of(device, kind, classes, dtype, rows, sequence_dim)
    more |= {"sequence_parallel": sequence_dim is not None, **options}
    loss = call(own, of_teacher, fn, **more)
    same_bits_everywhere(loss)
    student, teacher, target = problem
    whole = [tensor.double().requires_grad_() for tensor in student]
    wide = torch.promote_types(dtype, torch.float32)
    logits = [rounded(F.linear(*head), wide) for head in (whole, [t.double() for t in teacher])]
    caps = {name: value for name, value in options.items() if name in CAPS}
    wanted = fn(divergences(*logits, target, classes, **caps))[target != -100].mean()
    close(loss, wanted.detach(), dtype)
    of_input, *of_classes = torch.autograd.grad(wanted, whole)
    made_of_input, *made = torch.autograd.grad(loss, own)
    size = split(kind, V)[1]
    wide = [torch.zeros(V, *grad.shape[1:], dtype=grad.dtype).index_copy(0, classes, grad) for grad in of_classes]
    mine = [grad.new_zeros(size, *grad.shape[1:]).index_copy(0, more["classes"], grad) for grad in made]
    gradients_close((made_of_input, *mine), (of_input, *wide), kind, dtype, sequence_dim)


def draft_vocabulary(device):
    """``classes``: values, gradients, what is gathered, compiled, compared, refused; one rank may have none of them."""
    world, last = dist.get_world_size(), dist.get_world_size() - 1
    some = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:60].sort().values
    of_overlap = lambda d: -d.overlap.log() + d.jsd * d.coverage * (1 + d.agrees) * d.covers_top + d.kl  # noqa: E731
    for kind in ("chunk", "uneven", "empty"):
        behind = some[some >= -(-V // world)]  # the first rank has teacher's classes alone
        for classes in (some, behind):
            draft(device, kind, classes, of_overlap)
        draft(device, kind, some, of_overlap, chunk_rows=3, **CAPS)
        for dtype in DTYPES:
            draft(device, kind, some, smooth, dtype, chunk_rows=4, **CAPS)
    draft(device, "chunk", some, of_overlap, sequence_dim=0, rows=(2 * world, 3), chunk_rows=5)

    rows = 6
    own, of_teacher, more, (_, whole_teacher, _) = draft_of(device, "chunk", some, rows=(rows,))
    for fn, first, second in ((lambda d: d.kl, 7, 0), (of_overlap, 12, 4)):
        with Collectives() as mode:
            loss = call(own, of_teacher, fn, **more)
        seen = [number for name, number in mode.seen if name == "all_gather_into_tensor.default"]
        assert seen == [first * rows + 5, *([second * rows] if second else [])], seen

    def step(*own, **options):
        return call(own, of_teacher, of_overlap, **more | options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*own)
    torch.testing.assert_close(compiled, loss)
    torch.testing.assert_close(torch.autograd.grad(compiled, own), torch.autograd.grad(loss, own))
    torch.testing.assert_close(step(*own, check=True), loss)
    assert len(own[1]) > 1
    with torch.no_grad():
        torch.testing.assert_close(step(*own), loss.detach())
    ids, wrong = more["classes"], more["classes"].clone()
    wrong[0] = wrong[1] if dist.get_rank() == last else wrong[0]
    start, _, _ = split("chunk", V)
    text = rf"rank {last}: IndexError: classes has \d+, which the teacher does not have: .*classes\[mine\] - start"
    with pytest.raises(ValueError, match=text):
        step(*own, classes=ids + start, check=True)  # those of all classes
    if world > 1:
        with pytest.raises(ValueError, match=rf"the teacher's head has the same {V} rows on ranks 0 and 1; each rank"):
            whole = [tensor.to(device) for tensor in whole_teacher]
            call(own, whole, of_overlap, **more | {"classes": ids + start}, check=True)
    with pytest.raises(ValueError, match=f"rank {last}: ValueError: classes has .* more than once"):
        step(*own, classes=wrong, check=True)
    with pytest.raises(ValueError, match=r"classes is a tensor on rank 0 but None|must be split at the same classes"):
        step(*own, classes=None if dist.get_rank() == last else ids, check=True)
    with pytest.raises(TypeError, match="a mask: expected ids"):
        step(*own, classes=ids > 3)
    teacher_input, *head = of_teacher
    with pytest.raises(ValueError, match="ids but teacher_weight has no rows"):
        call(own, (teacher_input, *(one[:0] for one in head)), of_overlap, **more)
    if device == "cuda":
        assert step(*own, classes=wrong).isnan()
