"""Distillation of two heads over ranks that hold some rows of both; run on every rank by test_linear_parallel.py.

Expected values come from one process' float64 logits.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import over_ranks
from linear_compiled_cases import called, graphs_of
from linear_log_prob_cases import close, gradients_close
from linear_parallel_cases import H, head_of
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode
from vocab_parallel_cases import Collectives, V, same_bits_everywhere, shard_of, split

from xent_ops.kernels.rows import padded_classes
from xent_ops.testing import distillation_oracle

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TEACHER_H = 5
BETAS = (0.0, 0.25, 1.0)
OPTIONS = {
    "plain": {},
    "hard": {"hard_weight": 0.5},
    "all": {
        "hard_weight": 0.5,
        "temperature": 2.0,
        "softcap": 30.0,
        "teacher_softcap": 20.0,
        "logit_scale": 0.75,
        "teacher_logit_scale": 1.5,
    },
}


def heads_of(dtype, rows=(2, 5)):
    """(student, teacher, target): input, weight and bias of each, the same on every rank."""
    input, head, bias, _, target = head_of(dtype, rows)
    generator = torch.Generator().manual_seed(4)
    shapes = ((*rows, TEACHER_H), (V, TEACHER_H), (V,))
    teacher = [torch.randn(shape, generator=generator).to(dtype) / 2 for shape in shapes]
    return (input, head, bias), teacher, target


def expected(student, teacher, target, upstream=1.0, kept=None, reduction="mean", token_weight=None, divisor=1.0,
             **options):  # fmt: skip
    """(loss, gradients of the student's input, weight and bias) in float64; ``kept``: the classes that are not masked."""
    kept = torch.ones(V, dtype=torch.bool) if kept is None else kept
    (x, w, b), (y, u, c) = ([tensor.double() for tensor in head] for head in (student, teacher))
    place = kept.long().cumsum(0) - 1
    index = target if target is None else torch.where(target == -100, -100, place[target.clamp(min=0)])
    weight = torch.ones(x.shape[:-1]).double() if token_weight is None else token_weight.double()
    if target is not None:
        weight = torch.where(target != -100, weight, 0.0)
    factor = weight / (weight.sum() if reduction == "mean" else divisor if reduction == "sum" else 1.0)
    logits, of_teacher = F.linear(x, w[kept], b[kept]), F.linear(y, u[kept], c[kept])
    rows = distillation_oracle(logits, of_teacher, index, grad_loss=factor * upstream, **options)
    of_weight, of_bias = torch.zeros_like(w), torch.zeros_like(b)
    of_weight[kept], of_bias[kept] = rows.grad.flatten(0, -2).t() @ x.flatten(0, -2), rows.grad.flatten(0, -2).sum(0)
    loss = rows.loss * factor
    return (loss if reduction == "none" else loss.sum()), (rows.grad @ w[kept], of_weight, of_bias)


def leaves(device, kind, problem, sequence_dim=None, group=None):
    """This rank's tensors: those of the student, which require grad, and those of the teacher."""
    world, rank, place = dist.get_world_size(group), dist.get_rank(group), split(kind, V, group)
    made = []
    for more, (input, head, bias) in zip((0, 1), problem, strict=True):
        start, size, padding = place
        mine = input if sequence_dim is None else input.chunk(world, sequence_dim)[rank]
        padded = (start, size, padding + more if padding else 0)  # the teacher's head has other padding
        of_classes = (shard_of(head.t(), padded).t().contiguous(), shard_of(bias, padded))
        made.append([tensor.clone().to(device) for tensor in (mine, *of_classes)])
    return [tensor.requires_grad_() for tensor in made[0]], made[1]


def call(student, teacher, kind="chunk", group=None, **options):
    (x, w, b), (y, u, c) = student, teacher
    class_start = None if kind == "chunk" else split(kind, V, group)[0]
    given = {"num_classes": V, "class_start": class_start, "linear_bias": b, "teacher_bias": c, **options}
    return over_ranks.linear_distillation_loss(x, w, y, u, group=group, **given)


def one(device, kind, problem, sequence_dim=None, group=None, kept=None, **options):
    student, teacher, target = problem
    given = leaves(device, kind, (student, teacher), sequence_dim, group)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    if target is not None:
        moved["target"] = target.to(device)
    loss = call(*given, kind, group, sequence_parallel=sequence_dim is not None, **moved)
    same_bits_everywhere(loss, group)
    of_oracle = {name: value for name, value in options.items() if name not in ("chunk_rows", "accumulate_dtype")}
    wanted, grads = expected(student, teacher, target, 0.75, kept, **of_oracle)
    close(loss, wanted, student[0].dtype)
    made = torch.autograd.grad(loss, given[0], torch.tensor(0.75).to(loss))
    gradients_close(made, grads, kind, student[0].dtype, sequence_dim, group)
    return loss


def values(device, kind):
    for dtype, beta in itertools.product(DTYPES, BETAS):
        one(device, kind, heads_of(dtype), beta=beta, chunk_rows=4, **OPTIONS["all"])
    problem = heads_of(torch.float32)
    for name, beta in itertools.product(("plain", "hard"), BETAS):
        one(device, kind, problem, beta=beta, **OPTIONS[name])
    weight = torch.rand((2, 5), generator=torch.Generator().manual_seed(2))
    how = {"beta": 0.5, "chunk_rows": 3}
    one(device, kind, problem, reduction="sum", divisor=3.0, token_weight=weight, **how)
    one(device, kind, problem, token_weight=weight, **how)
    one(device, kind, (*problem[:2], None), temperature=2.0, **how)
    one(device, kind, heads_of(torch.bfloat16), accumulate_dtype=torch.float32, **how)


def sequence_parallel(device):
    world = dist.get_world_size()
    for (shape, dim), beta in itertools.product((((2 * world, 3), 0), ((3, 2 * world), 1)), BETAS):
        problem = heads_of(torch.float32, shape)
        one(device, "uneven", problem, dim, beta=beta, chunk_rows=5, **OPTIONS["all"])
        weight = torch.rand(shape, generator=torch.Generator().manual_seed(2))
        one(device, "chunk", (*problem[:2], None), dim, beta=beta, token_weight=weight)
        rows = rows_without_gradients(device, problem, dim, beta=beta)
        close(rows, expected(*problem, beta=beta, reduction="none")[0], torch.float32)
    one(device, "chunk", (*heads_of(torch.float32, (2 * world, 3))[:2], None), 0)


def rows_without_gradients(device, problem, sequence_dim=None, **options):
    student, teacher = leaves(device, "chunk", problem[:2], sequence_dim)
    more = {"target": problem[2].to(device), "reduction": "none", "sequence_parallel": sequence_dim is not None}
    with torch.no_grad():
        loss = call(student, teacher, chunk_rows=3, **more, **options)
    assert not loss.requires_grad
    same_bits_everywhere(loss)
    return loss


def masks_and_edges(device):
    """A rank whose classes all have no probability, for both or for one; ignored rows, and none; shards with a gap."""
    (x, w, b), (y, u, c), target = heads_of(torch.float32)
    first = -(-V // dist.get_world_size())  # all classes of the first rank
    kept = torch.arange(V) >= first
    if dist.get_world_size() == 1:
        kept[first // 2 :] = True
    masked, of_teacher = (torch.where(kept, bias, float("-inf")) for bias in (b, c))
    target = torch.where((target >= 0) & ~kept[target.clamp(min=0)], V - 1, target)
    for beta in BETAS:
        problem = ((x, w, masked), (y, u, of_teacher), target)
        one(device, "chunk", problem, kept=kept, beta=beta, chunk_rows=4, **OPTIONS["hard"])
        for student, teacher, infinite in ((masked, c, beta == 0.0), (b, of_teacher, beta == 1.0)):
            given = leaves(device, "chunk", ((x, w, student), (y, u, teacher)))
            loss = call(*given, beta=beta, target=target.to(device))
            assert loss.isinf() if infinite else loss.isfinite()
        given = leaves(device, "chunk", ((x, w, b), (y, u, c)))
        nothing = torch.full_like(target, -100).to(device)
        for rows, reduction in itertools.product((slice(None), slice(0)), ("mean", "sum")):
            (h, *student), (t, *teacher) = given
            loss = call((h[rows], *student), (t[rows], *teacher), beta=beta, target=nothing[rows], reduction=reduction)
            assert loss.isnan() if reduction == "mean" else loss == 0
            assert all(grad.count_nonzero() == 0 for grad in torch.autograd.grad(loss, given[0]))
        if dist.get_world_size() > 1:
            loss = call(*given, beta=beta, target=target.to(device), class_start=0)
            assert loss.isnan() and all(grad.isnan().any() for grad in torch.autograd.grad(loss, given[0]))


def ignored_rows_of_nan(device):
    """Their hidden states are not finite: no loss, and zeros for their input."""
    (x, w, b), (y, u, c), target = heads_of(torch.float32, (6,))
    x[0], y[0] = float("nan"), float("inf")  # the first target is ignored
    for beta in BETAS:
        student, teacher = leaves(device, "chunk", ((x, w, b), (y, u, c)))
        loss = call(student, teacher, beta=beta, target=target.to(device), **OPTIONS["hard"])
        (grad,) = torch.autograd.grad(loss, student[:1])
        rest = ((x[1:], w, b), (y[1:], u, c), target[1:])
        wanted, (of_input, *_) = expected(*rest, beta=beta, **OPTIONS["hard"])
        close(loss, wanted, torch.float32)
        close(grad[1:], of_input, torch.float32)
        assert grad[0].count_nonzero() == 0


def behaviour(device):
    """What is gathered, chunk by chunk; flops; a backward again; compiled; alone in a group."""
    world = dist.get_world_size()
    rows = 6 * world
    student, teacher, target = heads_of(torch.float32, (rows,))
    (x, w, b), of_teacher = leaves(device, "chunk", (student, teacher))
    target = target.to(device)

    def step(x, w, b, **options):
        more = {"target": target, "chunk_rows": rows // 2, **options}
        return call((x, w, b), of_teacher, **more)

    half, gather = rows // 2, "all_gather_into_tensor.default"
    hot = {"hard_weight": 0.5, "temperature": 2.0}
    for options, number in (({}, 5), ({"beta": 1.0}, 5), ({"beta": 0.5}, 4), (hot, 8), ({**hot, "beta": 0.5}, 7)):
        with Collectives() as mode:
            loss = step(x, w, b, **options)
        seen = [(gather, number * half + 5)] * 2 + [("all_reduce_.default", half * H)] * 2
        if options.get("beta") == 0.5:
            seen += [(gather, 2 * half)] * 2
        assert sorted(mode.seen) == sorted(seen), (mode.seen, seen)
        with Collectives() as mode:
            grads = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
            again = torch.autograd.grad(loss, (x, w, b))
        assert mode.seen == [] and all(map(torch.equal, grads, again))
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            torch.autograd.grad(loss, (x, w, b))
        if options == {**hot, "beta": 0.5}:
            compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x, w, b, **options)
            torch.testing.assert_close(compiled, loss)
            torch.testing.assert_close(torch.autograd.grad(compiled, (x, w, b)), grads)
        with Collectives() as mode, torch.no_grad():
            torch.testing.assert_close(step(x, w, b, **options), loss.detach())
        assert all(name == gather for name, _ in mode.seen)
    torch.testing.assert_close(step(x, w, b, check=True), step(x, w, b))
    with FlopCounterMode(display=False) as counter:
        step(x, w, b).backward()
    assert counter.get_total_flops() == 2 * rows * len(w) * (3 * H + TEACHER_H)
    with torch.autocast(device, torch.bfloat16):
        loss = step(x, w, b)
    grads = torch.autograd.grad(loss, (x, w, b))
    assert loss.dtype == torch.float32 and all(grad.dtype == torch.float32 for grad in grads)
    frozen = torch.autograd.grad(step(x.detach(), w, None, teacher_bias=None), w)
    assert frozen[0].shape == w.shape
    alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    with Collectives() as mode:
        one(device, "chunk", heads_of(torch.float32), group=alone, beta=0.5)
    assert not [name for name, _ in mode.seen if name.endswith("_tensor.default") or name == "all_reduce_.default"]


def graph(device):
    """Operators with collectives between them, and in the backward the scaling alone."""
    student, teacher, target = heads_of(torch.float32, (6,))
    (x, w, b), of_teacher = leaves(device, "chunk", (student, teacher))
    for beta, between in ((0.0, False), (0.5, True)):

        def step(x, w, b, target, beta=beta):
            return call((x * 2, w, b), of_teacher, target=target, beta=beta)

        forward, backward = graphs_of(step, x, w, b, target.to(device))
        wait = "_c10d_functional.wait_tensor"
        gather = ["_c10d_functional.all_gather_into_tensor", wait]
        middle = ["xent.divergences_forward", *gather] if between else []
        last = ["xent.linear_grad_input", "_c10d_functional.all_reduce", wait, "xent.attach_gradients"]
        begin = ["xent.linear_logits", "xent.linear_logits", "xent.divergences_forward"]
        assert forward == [*begin, *gather, *middle, *last], forward
        assert backward == ["xent.linear_scale_grad"] * 3


def any_number_of_rows(device):
    def step(x, w, b, y, u, c, target):
        return call((x * 2, w, b), (y, u, c), target=target, beta=0.5)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 11):
        student, teacher, target = heads_of(torch.float32, (rows,))
        (x, w, b), of_teacher = leaves(device, "chunk", (student, teacher))
        results = []
        for function in (step, compiled):
            loss = function(x, w, b, *of_teacher, target.to(device))
            results.append((loss.detach(), *torch.autograd.grad(loss, (x, w, b))))
        torch.testing.assert_close(*results)


def inductor(device):
    """Inductor's code computes what eager does, in the order of the loop, and writes the gradient over the logits."""
    from torch._inductor.utils import run_and_get_code

    # As many rows as make the logits larger than what else there is: Inductor orders by the peak of memory.
    student, teacher, target = heads_of(torch.float32, (192,))
    (x, w, b), of_teacher = leaves(device, "chunk", (student, teacher))

    def step(x, w, b, target):
        return call((x * 2, w, b), of_teacher, target=target, beta=0.5, chunk_rows=64, **OPTIONS["all"])

    def run(function):
        loss = function(x, w, b, target.to(device))
        return loss.detach(), *torch.autograd.grad(loss * 3, (x, w, b))

    made, (forward, backward) = run_and_get_code(run, torch.compile(step, fullgraph=True))
    torch.testing.assert_close(made, run(step), rtol=2e-5, atol=1e-6)
    same_bits_everywhere(made[0])
    gather, visit = "all_gather_into_tensor", "divergences_forward"
    begin = ["linear_logits", "linear_logits", visit, gather]
    gradient = ["divergences_backward_", "linear_grad_input"]
    end = [visit, gather, *gradient, "all_reduce_", "linear_cross_entropy_chunk_add_"]
    calls = [call for call in called(forward[forward.index("def call") :]) if call != "wait_tensor"]
    assert calls == [*begin, *begin, *end, *begin, *end, *end, "attach_gradients"], calls
    assert called(backward).count("scale_grad_") == 3
    assert f"empty_strided_{device}((64, {padded_classes(len(w), torch.float32)})" not in forward, "logits are copied"


def errors(device):
    """What a rank sees alone raises before it communicates; with check=True on every rank what one of them sees."""
    student, teacher, target = heads_of(torch.float32, (6,))
    (x, w, b), (y, u, c) = leaves(device, "chunk", (student, teacher))
    size, last = len(w), dist.get_world_size() - 1
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    bad = [
        ({"teacher_weight": u[1:], "teacher_bias": None}, ValueError, rf"linear_weight has {size} of the {V}"),
        ({"teacher_input": None}, TypeError, "teacher_input must be a torch.Tensor, got None"),
        ({"teacher_input": y[1:]}, ValueError, r"teacher_input has shape \(5, \d+\); expected \(6, \d+\)"),
        ({"teacher_bias": c[1:]}, ValueError, "teacher_bias has shape"),
        ({"teacher_weight": u.double()}, TypeError, "teacher_weight has dtype torch.float64 but teacher_input"),
        ({"teacher_input": y.clone().requires_grad_()}, RuntimeError, "teacher_input requires grad"),
        ({"teacher_weight": u.clone().requires_grad_()}, RuntimeError, "teacher_weight requires grad"),
        ({"linear_weight": w[1:], "linear_bias": None}, ValueError, "DTensor's chunk rule gives it"),
        ({"beta": 1.5}, ValueError, "beta must be between 0.0 and 1.0, got 1.5"),
        ({"temperature": 0.0}, ValueError, "temperature must be a finite number above 0"),
        ({"target": None, "hard_weight": 0.5}, ValueError, "hard_weight=0.5 is of the cross entropy on the target"),
        ({"target": target.to(device)[1:]}, ValueError, r"target has shape \(5,\); expected \(6,\)"),
        ({"reduction": "none"}, NotImplementedError, 'no gradient for reduction="none"'),
        ({"reduction": "avg"}, ValueError, "'avg' is not a valid value for reduction"),
        ({"divisor": 3.0}, ValueError, 'expected reduction="sum"'),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be at least 1"),
        ({"check": 1}, TypeError, "check must be"),
        ({"input": DTensor.from_local(x, mesh, [Replicate()], run_check=False)}, NotImplementedError, "of DTensors is not"),
        ({"sequence_parallel": True, "target": None, "reduction": "none"}, ValueError, "pass one with reduction"),
    ]  # fmt: skip
    if dist.get_world_size() == 1:
        bad = [case for case in bad if "chunk rule" not in case[2] and "sequence_parallel" not in case[0]]
    given = {"input": x, "linear_weight": w, "teacher_input": y, "teacher_weight": u, "num_classes": V,
             "target": target.to(device), "linear_bias": b, "teacher_bias": c}  # fmt: skip
    with Collectives() as mode:
        for keywords, error, text in bad:
            with pytest.raises(error, match=text):
                over_ranks.linear_distillation_loss(**{**given, **keywords})
        with pytest.raises(NotImplementedError, match="inside a functorch"):
            torch.func.grad(lambda x: over_ranks.linear_distillation_loss(**{**given, "input": x}))(x)
    assert mode.seen == []
    mine = dist.get_rank() == last
    for keywords, text in (
        ({"beta": 0.5 if mine else 0.25}, "beta is 0.25 on rank 0 but 0.5 on rank"),
        ({"teacher_bias": None if mine else c}, "teacher_bias is a tensor on rank 0 but None on rank"),
        ({"target": target.to(device) + (V if mine else 0), "hard_weight": 0.5}, f"rank {last}: IndexError"),
    ):
        if last > 0:
            with pytest.raises(ValueError, match=text):
                over_ranks.linear_distillation_loss(**{**given, **keywords}, check=True)
