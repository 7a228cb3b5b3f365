"""Distillation as users call it: products, which gradients are made, what is refused. Values: tests/fuzz."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.heads import random_head

import xent_ops
from xent_ops.ops.library import OPERATORS

N, H, TEACHER_H, V = 9, 6, 4, 13


def problem(device, dtype=torch.float64, classes=V, teacher_classes=V):
    """(student, teacher), each input, weight and bias, and a target with ignored rows."""
    *student, target = random_head(device, dtype, (N,), classes, H)
    teacher = random_head(device, dtype, (N,), teacher_classes, TEACHER_H, seed=1, requires_grad=False)[:3]
    return student, teacher, target


def of_heads(student, teacher, target, **options):
    (x, weight, bias), (y, teacher_weight, teacher_bias) = student, teacher
    more = {"linear_bias": bias, "teacher_bias": teacher_bias, "chunk_rows": 4, **options}
    return xent_ops.linear_distillation_loss(x, weight, y, teacher_weight, target=target, **more)


def of_logits(student, teacher, target, **options):
    return xent_ops.distillation_loss(F.linear(*student), F.linear(*teacher), target=target, **options)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_padding_rows_of_heads_hold_any_values(device, dtype, value):
    """Loss and gradients are those without padding, and the padding's own gradient is 0."""
    student, teacher, target = problem(device, dtype)
    padded = []
    for head, rows in ((student, 5), (teacher, 2)):
        more = [F.pad(head[1].detach(), (0, 0, 0, rows), value=value), F.pad(head[2].detach(), (0, rows), value=value)]
        padded.append([head[0], *(tensor.requires_grad_(head is student) for tensor in more)])

    def fn(d):
        return d.kl + d.agrees * (1 - d.overlap)

    def of_function(student, teacher, target, **options):
        (x, weight, bias), (y, teacher_weight, teacher_bias) = student, teacher
        biases = {"linear_bias": bias, "teacher_bias": teacher_bias}
        return xent_ops.linear_distillation_token_loss(x, weight, y, teacher_weight, fn, **biases, **options)

    for function, more in (
        (of_heads, {}),
        (of_heads, {"beta": 0.5, "reduction": "sum", "divisor": 3.0, "hard_weight": 0.5}),
        (of_heads, {"skip_ignored": True}),
        (lambda *args, **options: of_heads(*args, reduction="none", **options).sum(), {}),
        (of_function, {}),
    ):
        loss = function(padded[0], padded[1], target, num_classes=V, **more)
        wanted = function(student, teacher, target, **more)
        torch.testing.assert_close(loss, wanted)
        x, *of_head = torch.autograd.grad(loss, padded[0])
        torch.testing.assert_close([x, *(grad[:V] for grad in of_head)], [*torch.autograd.grad(wanted, student)])
        assert all((grad[V:] == 0).all() for grad in of_head)
        with torch.no_grad():
            torch.testing.assert_close(function(*padded, target, num_classes=V, **more), wanted)


def test_there_is_no_second_derivative(device):
    student, teacher, target = problem(device)
    with pytest.raises(RuntimeError, match="this loss has no second derivative"):
        torch.autograd.grad(of_heads(student, teacher, target), student, create_graph=True)
    for rows in (of_heads(student, teacher, target, reduction="none"), of_logits(student, teacher, target)):
        (grad, *_) = torch.autograd.grad(rows.sum(), student, create_graph=True)
        with pytest.raises(RuntimeError, match="this loss has no second derivative"):
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
    padded = problem(device, classes=V + 3, teacher_classes=V + 7)
    for way in (of_heads, of_logits):
        with pytest.raises(ValueError, match=r"has 16 classes but .* 20; .* num_classes="):
            way(*padded)
        with pytest.raises(ValueError, match="num_classes=17 is more than the 16 of"):
            way(*padded, num_classes=17)
    with pytest.raises(RuntimeError, match="teacher_logits requires grad"):
        torch.ops.xent.divergences_forward(x, x, target)
    assert OPERATORS["divergences_forward"].check_values is not None
