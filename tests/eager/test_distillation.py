"""Distillation as users call it, of given logits and of hidden states: values, gradients, what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.covering import covering

import xent_ops
from xent_ops.ops.library import OPERATORS
from xent_ops.testing import distillation_oracle

N, H, TEACHER_H, V = 9, 6, 4, 13
BETAS = (0.0, 0.25, 1.0)
OPTIONS = {
    "plain": {},
    "hard": {"hard_weight": 0.5, "temperature": 2.0},
    "caps": {"softcap": 3.0, "teacher_softcap": 4.0, "logit_scale": 0.75, "teacher_logit_scale": 1.5},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CLOSE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.05, "atol": 0.05},
    torch.float16: {"rtol": 0.01, "atol": 0.01},
}


def problem(device, dtype=torch.float64, rows=N, classes=V, teacher_classes=V):
    """(student, teacher), each input, weight and bias, and a target with ignored rows."""
    generator = torch.Generator().manual_seed(1)

    def tensors(features, classes):
        shapes = ((rows, features), (classes, features), (classes,))
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]

    student, teacher = tensors(H, classes), tensors(TEACHER_H, teacher_classes)
    target = torch.randint(V, (rows,), generator=generator)
    target[::4] = -100
    return [tensor.requires_grad_() for tensor in student], teacher, target.to(device)


def of_rows(logits, teacher_logits, target, **options):
    """Losses of rows in float64, differentiable: the oracle's, whose gradient is known."""
    expected = distillation_oracle(logits, teacher_logits, target, **options)

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.like = logits
            return expected.loss.to(logits.device)

        @staticmethod
        def backward(ctx, grad):
            return (expected.grad * grad.cpu().unsqueeze(-1)).to(ctx.like)

    return Rows.apply(logits)


def expected_loss(student, teacher, target, reduction="mean", token_weight=None, divisor=1.0, **options):
    """Of float64 copies of all logits."""
    logits, teacher_logits = (F.linear(*[tensor.double() for tensor in head]) for head in (student, teacher))
    rows = of_rows(logits, teacher_logits, target, **options)
    weight = (target != -100).to(rows) if token_weight is None else torch.where(target != -100, token_weight, 0.0)
    rows = rows * weight
    if reduction == "none":
        return rows
    return rows.sum() / (weight.sum() if reduction == "mean" else divisor)


def of_heads(student, teacher, target, **options):
    (x, weight, bias), (y, teacher_weight, teacher_bias) = student, teacher
    more = {"linear_bias": bias, "teacher_bias": teacher_bias, "chunk_rows": 4, **options}
    return xent_ops.linear_distillation_loss(x, weight, y, teacher_weight, target=target, **more)


def of_logits(student, teacher, target, **options):
    return xent_ops.distillation_loss(F.linear(*student), F.linear(*teacher), target=target, **options)


WAYS = [of_heads, of_logits]
named = {"ids": lambda value: getattr(value, "__name__", str(value))}


def assert_close(value, leaves, wanted, dtype):
    """Value and gradients, relative to the largest number of each."""
    grads = torch.autograd.grad(value.sum(), leaves)
    correct = torch.autograd.grad(wanted.sum(), leaves)
    for got, right in zip((value, *grads), (wanted, *correct), strict=True):
        size = max(right.abs().max().item(), 1.0)
        torch.testing.assert_close(got.double() / size, right.double() / size, **CLOSE[dtype])


@pytest.mark.parametrize("dtype, beta, name, way", covering(DTYPES, BETAS, OPTIONS, WAYS), **named)
def test_values(device, dtype, beta, name, way):
    student, teacher, target = problem(device, dtype)
    options = {"beta": beta, **OPTIONS[name]}
    loss = way(student, teacher, target, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and loss.shape == ()
    wanted = expected_loss(student, teacher, target, **options)
    assert_close(loss, student, wanted, dtype)
    with torch.no_grad():
        torch.testing.assert_close(way(student, teacher, target, **options), loss, **CLOSE[dtype])


REDUCTIONS = covering(["mean", "sum", "none"], [False, True], [False, True], WAYS)


@pytest.mark.parametrize("reduction, weighted, skip_ignored, way", REDUCTIONS, **named)
def test_reductions(device, way, reduction, weighted, skip_ignored):
    student, teacher, target = problem(device)
    token_weight = torch.randn(N, dtype=torch.float64).to(device) if weighted else None
    options = {"reduction": reduction, "token_weight": token_weight, "hard_weight": 0.5, "beta": 0.5}
    if reduction == "sum":
        options["divisor"] = 3.0
    how = {"skip_ignored": skip_ignored} if way is of_heads else {}
    wanted = expected_loss(student, teacher, target, **options)
    assert_close(way(student, teacher, target, **options, **how), student, wanted, torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(way(student, teacher, target, **options, **how), wanted.detach())


@pytest.mark.parametrize("dtype, beta, name, skip_ignored", covering(DTYPES, BETAS, OPTIONS, [False, True]), **named)
def test_rows(device, dtype, beta, name, skip_ignored):
    """Upstream gradients of each row, far from one; a second backward; frozen tensors; no second derivative."""
    student, teacher, target = problem(device, dtype)
    options = {"beta": beta, **OPTIONS[name]}
    rows = of_heads(student, teacher, target, reduction="none", skip_ignored=skip_ignored, **options)
    wanted = expected_loss(student, teacher, target, reduction="none", **options)
    factors = 2.0**-8 * (1 + torch.rand(N, dtype=torch.float64).to(device))
    correct = torch.autograd.grad(wanted, student, factors)
    for retain_graph in (True, False):
        made = torch.autograd.grad(rows, student, factors.to(rows), retain_graph=retain_graph)
        for got, right in zip(made, correct, strict=True):
            assert got.dtype == dtype and got.is_contiguous()
            size = right.abs().max().item()
            torch.testing.assert_close(got.double() / size, right.double() / size, **CLOSE[dtype])
    frozen = [tensor.detach() for tensor in student]
    frozen[1].requires_grad_()
    rows = of_heads(frozen, teacher, target, reduction="none", skip_ignored=skip_ignored, **options)
    (again,) = torch.autograd.grad(rows, frozen[1], factors.to(rows), create_graph=True)
    assert torch.equal(again, made[1])
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(again.sum(), frozen[1])


def generalized_jsd_loss(student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0, reduction="batchmean"):
    """TRL 0.24's, of GKDTrainer."""
    student_logits = student_logits / temperature
    teacher_logits = teacher_logits / temperature
    student_log_probs = F.log_softmax(student_logits, dim=-1)
    teacher_log_probs = F.log_softmax(teacher_logits, dim=-1)
    if beta == 0:
        jsd = F.kl_div(student_log_probs, teacher_log_probs, reduction="none", log_target=True)
    elif beta == 1:
        jsd = F.kl_div(teacher_log_probs, student_log_probs, reduction="none", log_target=True)
    else:
        beta = torch.tensor(beta, dtype=student_log_probs.dtype, device=student_log_probs.device)
        mixture_log_probs = torch.logsumexp(
            torch.stack([student_log_probs + torch.log1p(-beta), teacher_log_probs + torch.log(beta)]), dim=0
        )
        kl_teacher = F.kl_div(mixture_log_probs, teacher_log_probs, reduction="none", log_target=True)
        kl_student = F.kl_div(mixture_log_probs, student_log_probs, reduction="none", log_target=True)
        jsd = beta * kl_teacher + (1 - beta) * kl_student
    if labels is not None:
        jsd = jsd[labels != -100]
    if reduction == "batchmean":
        return jsd.sum() / (labels != -100).sum() if labels is not None else jsd.sum() / jsd.size(0)
    return jsd.sum() if reduction == "sum" else jsd


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("with_target", [False, True], ids=["", "labels"])
@pytest.mark.parametrize("beta", BETAS)
def test_is_what_trl_computes(device, beta, with_target, way):
    student, teacher, target = problem(device)
    target = target if with_target else None
    options = {"beta": beta, "temperature": 0.9}
    theirs = generalized_jsd_loss(F.linear(*student), F.linear(*teacher), target, **options)
    assert_close(way(student, teacher, target, **options), student, theirs, torch.float64)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(device, beta, way):
    student, teacher, target = problem(device)
    options = {"beta": beta, "hard_weight": 0.5, "temperature": 2.0, "softcap": 4.0}
    assert torch.autograd.gradcheck(lambda *leaves: way(leaves, teacher, target, **options), student)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("beta", BETAS)
def test_padded_vocabularies(device, beta, way):
    """Classes behind num_classes have no probability on either side, and no gradient."""
    student, teacher, target = problem(device, classes=V + 3, teacher_classes=V + 7)
    options = {"beta": beta, "hard_weight": 0.25}
    cut = [[head[0], head[1][:V], head[2][:V]] for head in (student, teacher)]
    wanted = expected_loss(*cut, target, **options)
    loss = way(student, teacher, target, num_classes=V, **options)
    assert_close(loss, student, wanted, torch.float64)
    _, of_weight, of_bias = torch.autograd.grad(way(student, teacher, target, num_classes=V, **options), student)
    assert not of_weight[V:].any() and not of_bias[V:].any()
    with pytest.raises(ValueError, match=r"has 16 classes but .* 20; .* num_classes="):
        way(student, teacher, target)
    with pytest.raises(ValueError, match="num_classes=17 is more than the 16 of"):
        way(student, teacher, target, num_classes=17)


def test_gradients_that_are_wanted(device):
    """Of a frozen head or input none is made; leading dimensions and no bias; a teacher of another dtype."""
    student, teacher, target = problem(device)
    x, weight, _ = student
    y, teacher_weight = teacher[0].float().view(3, 3, -1), teacher[1].float()

    def call(x, weight):
        x, labels = x.view(3, 3, -1), target.view(3, 3)
        return xent_ops.linear_distillation_loss(x, weight, y, teacher_weight, target=labels, beta=0.5, chunk_rows=2)

    wanted = torch.autograd.grad(call(x, weight), (x, weight))
    torch.testing.assert_close(torch.autograd.grad(call(x.detach(), weight), weight)[0], wanted[1])
    torch.testing.assert_close(torch.autograd.grad(call(x, weight.detach()), x)[0], wanted[0])
    torch.testing.assert_close(torch.autograd.grad(7 * call(x, weight.detach()), x)[0], 7 * wanted[0])


def test_there_is_no_second_derivative(device):
    student, teacher, target = problem(device)
    with pytest.raises(RuntimeError, match="a distillation loss has no second derivative"):
        torch.autograd.grad(of_heads(student, teacher, target), student, create_graph=True)
    (grad, *_) = torch.autograd.grad(of_logits(student, teacher, target), student, create_graph=True)
    with pytest.raises(RuntimeError, match="a distillation loss has no second derivative"):
        grad.sum().backward()


def test_no_product_is_made_in_vain(device, monkeypatch):
    """Four a chunk with gradients, two without; three where the head is frozen."""
    calls = []
    student, teacher, target = problem(device)
    for name in ("mm", "addmm"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, real=real, **more: calls.append(1) or real(*args, **more))

    def products(student):
        calls.clear()
        of_heads(student, teacher, target, chunk_rows=None)
        return len(calls)

    assert products(student) == 4
    assert products([student[0], student[1].detach(), student[2].detach()]) == 3
    with torch.no_grad():
        assert products(student) == 2


def test_errors(device):
    student, teacher, target = problem(device, torch.float32)
    x, weight, _ = student
    y, teacher_weight, _ = teacher
    call = xent_ops.linear_distillation_loss
    bad = [
        (lambda: call(x, weight, y.clone().requires_grad_(), teacher_weight), RuntimeError, "teacher_input requires grad, .* torch.no_grad"),
        (lambda: call(x, weight, y, teacher_weight.clone().requires_grad_()), RuntimeError, "teacher_weight requires grad"),
        (lambda: call(x, weight, y, teacher_weight, teacher_bias=torch.ones(V, device=device, requires_grad=True)), RuntimeError, "teacher_bias requires grad"),
        (lambda: call(x, weight, y[:5], teacher_weight), ValueError, r"teacher_input has shape \(5, 4\); expected \(9, 4\), the rows of input"),
        (lambda: call(x, weight, y, weight.detach()), ValueError, r"teacher_weight has shape \(13, 6\); expected \(13, 4\)"),
        (lambda: call(x, weight, y.double(), teacher_weight), TypeError, "teacher_weight has dtype torch.float32 but teacher_input torch.float64"),
        (lambda: call(x, weight, y, teacher_weight, beta=1.5), ValueError, "beta must be between 0.0 and 1.0, got 1.5"),
        (lambda: call(x, weight, y, teacher_weight, temperature=0.0), ValueError, "temperature must be a finite number above 0, got 0.0"),
        (lambda: call(x, weight, y, teacher_weight, target=target, hard_weight=math.inf), ValueError, "hard_weight must be finite"),
        (lambda: call(x, weight, y, teacher_weight, hard_weight=0.5), ValueError, "hard_weight=0.5 is of the cross entropy on the target: pass target="),
        (lambda: call(x, weight, y, teacher_weight, teacher_softcap=-1.0), ValueError, "teacher_softcap must be a finite number above 0"),
        (lambda: call(x, weight, y, teacher_weight, target=target[:3]), ValueError, r"target has shape \(3,\)"),
        (lambda: call(x, weight, y, teacher_weight, num_classes=0), ValueError, "num_classes must be at least 1, got 0"),
        (lambda: call(x, weight, y, teacher_weight, reduction="batchmean"), ValueError, "'batchmean' is not a valid value for reduction"),
        (lambda: call(x, weight, y, teacher_weight, divisor=3.0), ValueError, 'divisor is what a sum is divided by: expected reduction="sum"'),
        (lambda: call(x, weight, y, None), TypeError, "teacher_weight must be a torch.Tensor, got None"),
        (lambda: xent_ops.distillation_loss(x @ weight.t(), y), ValueError, r"has 13 classes but teacher_logits 4; .* num_classes="),
        (lambda: xent_ops.distillation_loss(x, x), RuntimeError, "teacher_input requires grad"),
        (lambda: xent_ops.distillation_loss(x, x.detach()[None]), ValueError, r"teacher_logits has shape \(1, 9, 6\); expected"),
        (lambda: torch.func.grad(lambda x: xent_ops.distillation_loss(x, x.detach()))(x), NotImplementedError, "inside a functorch transform"),
    ]  # fmt: skip
    for make, error, text in bad:
        with pytest.raises(error, match=text):
            make()
    with pytest.raises(RuntimeError, match="teacher_logits requires grad"):
        torch.ops.xent.divergences_forward(x, x, target)
    assert OPERATORS["divergences_forward"].check_values is not None
