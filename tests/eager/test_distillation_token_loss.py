"""Losses that are a user's function of a token's divergences: costs, refusals. Values: tests/fuzz."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.dispatch_log import operators_of
from helpers.divergence_oracle import divergences
from helpers.heads import random_head

import xent_ops

N, H, G, V, T = 7, 8, 6, 19, 40  # rows; features of the student and the teacher; the student's classes and all


def nla(d):
    return -d.overlap.clamp(min=1e-6).log()


def lk(d):
    weight = (-3.0 * d.overlap.detach()).exp()
    return weight * d.kl + (1 - weight) * (1 - d.overlap)


def all_fields(d):
    mask = 0.5 + d.agrees + 2 * d.covers_top
    return mask * (d.kl + 2 * d.reverse_kl * d.overlap - d.log_prob.exp() + d.jsd**2 + d.coverage)


def problem(device, dtype=torch.float32, classes=None, shape=(N,)):
    """(student's leaves, teacher, classes, target)."""
    *student, target = random_head(device, dtype, shape, V, H, ignored=slice(1, None, 3))
    teacher = random_head(device, dtype, shape, T if classes else V, G, seed=1, requires_grad=False)[:3]
    ids = torch.randperm(T, generator=torch.Generator().manual_seed(0))[:V].to(device) if classes else None
    return student, teacher, ids, target


def call(student, teacher, fn, **options):
    (x, w, *b), (y, u, *c) = student, teacher
    bias = {"linear_bias": b[0], "teacher_bias": c[0]} if b else {}
    return xent_ops.linear_distillation_token_loss(x, w, y, u, fn, **bias, **options)


def test_a_narrow_teacher_of_float64_logits(device):
    """With classes the numbers are as exact as without."""
    g = torch.Generator().manual_seed(1)
    z, y = (3 * torch.randn(N, V, generator=g, dtype=torch.float64) for _ in range(2))
    z, y = z.to(device).requires_grad_(), y.float().to(device)
    fn, ids = (lambda d: d.overlap + d.kl * d.coverage), torch.arange(V, device=device)
    losses = [xent_ops.distillation_token_loss(z, y, fn, classes=classes) for classes in (None, ids)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0.0)
    grads = [torch.autograd.grad(loss, z)[0] for loss in losses]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-14)


def test_the_teacher_renormalised_everywhere_needs_no_argument(device):
    """Its rows of these classes are a head; overlap alone has another meaning with ``classes``."""
    student, (y, u, c), ids, _ = problem(device, torch.float64, True)
    part = (y, u[ids], c[ids])
    for fn in (lambda d: d.kl + d.reverse_kl, lambda d: d.jsd):
        torch.testing.assert_close(call(student, (y, u, c), fn, classes=ids), call(student, part, fn))
    whole, alone = (call(student, t, lambda d: d.overlap, **o) for t, o in (((y, u, c), {"classes": ids}), (part, {})))
    assert whole < alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_logits(device, dtype):
    """The loss is that of float32 tensors, its gradients are rounded once."""
    student, teacher, ids, target = problem(device, dtype, True)
    wide = [t.detach().float().requires_grad_() for t in student]
    options = {"target": target, "classes": ids, "chunk_rows": 4}
    wanted = call(wide, [t.float() for t in teacher], all_fields, **options)
    loss = call(student, teacher, all_fields, logits_dtype=torch.float32, **options)
    torch.testing.assert_close(loss, wanted, rtol=2e-6, atol=2e-6)
    for grad, right in zip(*(torch.autograd.grad(*one) for one in ((loss, student), (wanted, wide))), strict=True):
        assert (grad.float() - right).norm() < 2e-2 * right.norm()
    assert torch.equal(call(student, teacher, all_fields, **options), loss)
    assert (call(student, teacher, all_fields, logits_dtype=dtype, **options) - wanted).abs() > 1e-5


def test_constants_are_factors(device):
    """Do the argmaxes agree, is the teacher's a class of the student, how much has it there; with a target."""
    student, teacher, ids, target = problem(device, torch.float64, True, shape=(64,))
    loss = call(student, teacher, all_fields, target=target, classes=ids)
    z, y = F.linear(*student).cpu(), F.linear(*teacher).cpu()
    wanted = all_fields(divergences(z, y, target.cpu(), ids.cpu()))[target.cpu() != -100].mean()
    torch.testing.assert_close(loss.cpu(), wanted)
    for grad, right in zip(*(torch.autograd.grad(one, student) for one in (loss, wanted)), strict=True):
        torch.testing.assert_close(grad, right)


def test_metrics_of_a_draft_model(device):
    """One call without gradients: the acceptance rate, agreement, coverage and what they make."""
    student, teacher, ids, _ = problem(device, torch.float64, True, shape=(64,))
    found = {}

    def metrics(d):
        found.update({name: getattr(d, name) for name in ("overlap", "coverage", "agrees", "covers_top")})
        return d.overlap + d.agrees + d.covers_top + d.coverage

    with torch.no_grad():
        total = call(student, teacher, metrics, classes=ids)
        z, y = F.linear(*student).cpu(), F.linear(*teacher).cpu()
    right = divergences(z, y, None, ids.cpu())
    for name in ("overlap", "coverage", "agrees", "covers_top"):
        torch.testing.assert_close(found[name].cpu(), getattr(right, name))
    torch.testing.assert_close(total.cpu(), (right.overlap + right.agrees + right.covers_top + right.coverage).mean())
    assert 0 < found["covers_top"].sum() < 64


FIELDS = xent_ops.TokenDivergences._fields


@pytest.mark.parametrize("classes", [False, True], ids=["all classes", "draft vocabulary"])
def test_all_fields_are_0_in_ignored_rows(device, classes):
    """In one call and in chunks, also of rows that are NaN: a sum over rows is the sum over the counted ones."""
    student, teacher, ids, target = problem(device, torch.float64, classes, shape=(12,))
    x, ignored = student[0].detach().clone(), target == -100
    x[ignored] = float("nan")
    student = [x.requires_grad_(), *student[1:]]
    right = divergences(F.linear(*student), F.linear(*teacher), target, ids)

    def of_logits(fn, **options):
        return xent_ops.distillation_token_loss(F.linear(*student), F.linear(*teacher), fn, **options)

    def of_heads(fn, **options):
        return call(student, teacher, fn, **options)

    def found(function, **options):
        seen = []

        def fn(d):
            seen.append(torch.stack([getattr(d, name).detach() for name in FIELDS]))
            return d.kl

        function(fn, target=target, classes=ids, **options)
        return torch.cat(seen[1:], 1)  # without the call on tokens of zeros

    for fields in (found(of_logits), found(of_heads), found(of_heads, chunk_rows=5), found(of_heads, check=True)):
        fields = fields[:, :12]  # check=True sees all rows more than once
        assert ignored.sum() == 4 and (fields[:, ignored] == 0).all()
        torch.testing.assert_close(fields[:, ~ignored], torch.stack(right)[:, ~ignored])
    with torch.no_grad():
        torch.testing.assert_close(found(of_heads)[:, ~ignored], fields[:, ~ignored])
        assert (found(of_heads, skip_ignored=True)[:, ignored] == 0).all()


CHUNK = ["linear_logits", "linear_logits", "linear_grad_input", "linear_cross_entropy_chunk_add_"]


def test_what_is_not_read_costs_nothing(device, monkeypatch):
    student, teacher, ids, target = problem(device, classes=True)
    seen, chunk = [], torch.ops.xent.divergences_forward

    def noted(*args, **options):
        seen.append(options.get("fields", "kl"))
        return chunk(*args, **options)

    monkeypatch.setattr(torch.ops.xent, "divergences_forward", noted)
    for fn, wanted in (
        (lambda d: d.kl, ("kl", False)),
        (nla, ("overlap", False)),
        (lambda d: d.jsd * d.agrees, ("mixture", True)),
        (lambda d: d[3] * d.coverage, ("overlap", False)),
        (all_fields, ("kl,reverse_kl,mixture,overlap,log_prob", True)),
    ):
        call(student, teacher, fn, target=target, classes=ids)
        assert seen.pop() == wanted[0]
    monkeypatch.undo()

    def made(**options):
        found = operators_of(lambda: call(student, teacher, lk, classes=ids, **options))
        return [name for name in found if "linear" in name or "attach" in name]

    assert made(chunk_rows=4) == [*CHUNK, *CHUNK, "attach_gradients"]
    with torch.no_grad():
        assert made() == ["linear_divergences_forward"]


def test_check(device):
    student, teacher, ids, target = problem(device, classes=True)
    call(student, teacher, lk, classes=ids, target=target, check=True)
    with pytest.raises(ValueError, match="must not mix tokens"):
        call(student, teacher, lambda d: d.kl - d.kl.mean(), check=True, classes=ids)


def test_a_function_that_writes_to_what_it_gets(device):
    """check=True calls it more often; what it wrote then does not count."""
    student, teacher, ids, target = problem(device, torch.float64, True)
    logits = F.linear(*student), F.linear(*teacher)

    def writing(d, row):
        weight = d.agrees
        weight += 1.0
        row *= weight
        return d.kl * row * d.coverage.mul_(2.0)

    def right(d, row):
        return d.kl * row * (d.agrees + 1) * 2 * d.coverage

    for function in (
        lambda fn, **options: call(student, teacher, fn, **options),
        lambda fn, **options: xent_ops.distillation_token_loss(*logits, fn, **options),
    ):
        options = {"rows": (torch.rand(N, device=device, dtype=torch.float64),), "classes": ids, "target": target}
        wanted = function(right, **options)
        for check in (False, True):
            loss = function(writing, **options, check=check)
            torch.testing.assert_close(loss, wanted)
            grads = [torch.autograd.grad(one, student, retain_graph=True) for one in (loss, wanted)]
            torch.testing.assert_close(*grads)


def test_refused_in_words(device):
    student, teacher, ids, _ = problem(device, classes=True)
    mask = torch.zeros(T, dtype=torch.bool, device=device).index_fill(0, ids, True)
    for options, error, text in (
        ({"classes": mask}, TypeError, r"classes has dtype torch.bool, a mask: .* classes.nonzero\(\).squeeze\(-1\)"),
        ({"classes": ids.float()}, TypeError, "classes has dtype torch.float32"),
        ({"classes": ids[:-1]}, ValueError, r"classes has shape \(18,\); expected \(19,\)"),
        ({"classes": ids, "num_classes": V}, ValueError, "classes= and num_classes= exclude each other"),
        ({}, ValueError, "linear_weight has 19 classes but teacher_weight 40"),
        ({"classes": ids, "reduction": "none"}, ValueError, "'none' is not a valid value for reduction"),
        ({"classes": ids, "temperature": 0.0}, ValueError, "temperature must be a finite number above 0"),
        ({"classes": ids, "beta": 1.5}, ValueError, "beta must be between 0.0 and 1.0"),
        ({"classes": ids, "ignore_index": 3}, ValueError, "ignore_index=3 is of the target, which is None"),
        ({"classes": ids, "batch_invariant": True}, TypeError, "batch_invariant"),
    ):
        with pytest.raises(error, match=text):
            call(student, teacher, nla, **options)
    with pytest.raises(ValueError, match="fn reads log_prob, the log-probability of the target: pass target="):
        call(student, teacher, lambda d: -d.log_prob, classes=ids)
    with pytest.raises(ValueError, match=r"beta of a mixture .* the ends are kl and reverse_kl"):
        call(student, teacher, lambda d: d.jsd, classes=ids, beta=1.0)
    with pytest.raises(AttributeError, match=r"TokenDivergences has no 'acceptance'; it has kl, .* and covers_top"):
        call(student, teacher, lambda d: d.acceptance, classes=ids)
    with pytest.raises(RuntimeError, match=r"must depend on stats.kl, .* or stats.log_prob, not detached"):
        call(student, teacher, lambda d: d.agrees, classes=ids)
    with pytest.raises(RuntimeError, match="teacher_weight requires grad"):
        call(student, [teacher[0], teacher[1].clone().requires_grad_(), teacher[2]], nla, classes=ids)


def test_float16_under_a_loss_scale(device):
    """The coefficients are unknown before the function ran, so rows' operators serve: no part of a gradient is lost."""
    student, teacher, ids, _ = problem(device, torch.float16, True)
    for fn in (nla, lk):
        small = call(student, teacher, fn, reduction="sum", divisor=2.0**24, classes=ids) * 2.0**24
        plain = call(student, teacher, fn, reduction="sum", classes=ids)
        found, right = (torch.autograd.grad(loss, student) for loss in (small, plain))
        torch.testing.assert_close(found, right)


def test_classes_of_eight_bits(device):
    """200 of 300 classes is one of them."""
    student, teacher = torch.randn(2, 3, device=device, requires_grad=True), torch.randn(2, 300, device=device)
    classes = torch.tensor([1, 200, 3], device=device)
    losses = [xent_ops.distillation_token_loss(student, teacher, nla, classes=ids) for ids in (classes, classes.byte())]
    assert torch.equal(*losses) and losses[0].isfinite()


def test_classes_that_are_not_ids(device, raises_out_of_range):
    """Of values a CPU raises errors; a GPU's loss and gradients are NaN. Offsets are found because they are equal."""
    student, teacher, ids, _ = problem(device, classes=True)
    offsets = torch.zeros(V, dtype=torch.int64, device=device)
    logits = F.linear(*student), F.linear(*teacher)
    for function in (
        lambda classes: call(student, teacher, nla, classes=classes),
        lambda classes: xent_ops.distillation_token_loss(*logits, nla, classes=classes),
    ):
        if not raises_out_of_range:
            loss = function(offsets)
            assert loss.isnan() and torch.autograd.grad(loss, student[0], retain_graph=True)[0].isnan().all()
            continue
        with pytest.raises(ValueError, match=r"classes has 0 more than once: .* \(d2t\) they are torch.arange"):
            function(offsets)
        with pytest.raises(IndexError, match="classes has 40, which the teacher does not have: valid are 0 to 39"):
            function(ids.clone().fill_(T))


def test_a_teacher_that_masks_the_whole_draft_vocabulary():
    """EAGLE-3 of docs/recipes.md: its kl is NaN in this row, which counts nothing."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (function,) = re.findall(r"^def eagle3\(.*?(?=^\n)", page, re.DOTALL | re.MULTILINE)
    names = {"torch": torch}
    exec(function, names)
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    y, v, classes, weight = torch.randn(3, 8), torch.randn(20, 8), torch.arange(0, 20, 4), torch.rand(3)
    logits = y @ v.t()
    logits[1, classes] = -torch.inf
    logits[0] = logits[0].sort().values.roll(1)  # the largest is class 0 of the draft's
    loss = xent_ops.distillation_token_loss(
        x @ w.t(), logits, names["eagle3"], rows=(weight,), classes=classes, reduction="sum"
    )
    log_t, log_s = logits[0, classes].log_softmax(-1), (x[0] @ w.t()).log_softmax(-1)
    in_draft = torch.isin(logits[2].argmax(), classes)
    others = (
        logits[2, classes].softmax(-1) * (logits[2, classes].log_softmax(-1) - (x[2] @ w.t()).log_softmax(-1))
    ).sum()
    wanted = weight[0] * (log_t.exp() * (log_t - log_s)).sum() + weight[2] * in_draft * others
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(wanted, (x, w)))
