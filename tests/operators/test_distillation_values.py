"""Distillation of given logits: values of the operators. test_distillation_special.py has numbers that are not ordinary."""

import math

import pytest
import torch
from fixed_losses import backward, backward_, fixed, forward, with_grad, with_grad_
from helpers.covering import covering

from xent_ops.kernels import reference_divergences
from xent_ops.testing import assert_distillation, distillation_oracle, realistic_logits

pytestmark = pytest.mark.interpreter

INF, BETAS = math.inf, (0.0, 0.25, 0.875, 1.0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Exactly representable: the interpreter hands kernels a Python float as float32.
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.0},
    "hard": {"hard_weight": 0.5},
    "hard-temperature": {"hard_weight": 0.5, "temperature": 2.0},
    "caps": {"softcap": 20.0, "teacher_softcap": 8.0, "logit_scale": 1.5, "temperature": 0.5, "hard_weight": 0.25},
    "scales": {"teacher_logit_scale": 0.5, "logit_scale": -1.5, "ignore_index": 3},
}
# (classes, columns of the student, of the teacher)
WIDTHS = [(1, 1, 1), (37, 37, 37), (256, 256, 256), (1003, 1008, 1024), (9000, 9000, 9001)]


def problem(device, rows, dtype, teacher_dtype, widths, seed=0):
    classes, width, teacher_width = widths
    logits = realistic_logits(rows, width, dtype=dtype, seed=seed)
    teacher = realistic_logits(rows, teacher_width, dtype=teacher_dtype, seed=seed + 1)
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(seed))
    target[1::3] = -100
    return logits.to(device), teacher.to(device), target.to(device)


def given(widths, **options):
    return options if len(set(widths)) == 1 else {"num_classes": widths[0], **options}


def long_in_float64(widths, name, beta, dtype):
    """Whose tiles are of 512 columns whatever the width."""
    return widths[0] > 8192 and dtype == torch.float64


@pytest.mark.parametrize(
    "widths, name, beta, dtype", covering(WIDTHS, OPTIONS, BETAS, DTYPES, but=long_in_float64), ids=str
)
def test_values(device, widths, name, beta, dtype):
    """Each operator and its in-place form against the float64 oracle; the twins leave the gradient in the logits."""
    logits, teacher, target = problem(device, 4, dtype, dtype, widths)
    options = given(widths, beta=beta, **OPTIONS[name])
    target = torch.where(target == -100, options.get("ignore_index", -100), target)
    if options.get("ignore_index") == 3:
        target = target.clamp(max=3)
    scale = torch.randn(4, generator=torch.Generator().manual_seed(3)).to(device)
    expected = distillation_oracle(logits, teacher, target, grad_loss=scale, **options)
    before = logits.clone()
    loss, statistics = forward(logits, teacher, target, **options)
    grad = backward(scale, logits, teacher, target, statistics, **options)
    assert grad.dtype == dtype and grad.is_contiguous()
    assert_distillation(loss, grad, expected)
    at_once, made = with_grad(logits, teacher, target, scale, **options)
    assert torch.equal(logits, before)
    assert_distillation(at_once, made, expected)
    over, version = logits.clone(), logits._version
    assert backward_(scale, over, teacher, target, statistics, **options) is None
    assert_distillation(loss, over, expected)
    assert_distillation(with_grad_(logits, teacher, target, scale, **options), logits, expected)
    assert logits._version > version


def test_plain_torch(device):
    """The functions that serve where there are no kernels, which the interpreter's process does not run."""
    for beta in BETAS:
        for widths in WIDTHS[:4]:
            for options in OPTIONS.values():
                logits, teacher, target = problem(device, 5, torch.float32, torch.bfloat16, widths)
                options = given(widths, **{**options, "ignore_index": -100, "beta": beta})
                loss, plain = fixed(**options), reference_divergences.divergences_with_grad
                keywords = {**loss.spec._asdict(), "hard_weight": loss.hard_weight}
                loss, grad = plain(logits, teacher, target, torch.tensor(2.0, device=device), **keywords)
                assert_distillation(loss, grad, distillation_oracle(logits, teacher, target, grad_loss=2.0, **options))


@pytest.mark.parametrize("beta", BETAS)
def test_rows_that_lie_apart(device, beta):
    """Views, another dtype of the teacher, targets of another dtype, an upstream gradient of a scalar, and of none."""
    logits, teacher, target = problem(device, 12, torch.bfloat16, torch.float32, (40, 40, 48))
    logits, teacher = logits.view(3, 4, 40)[:, :-1], teacher.view(4, 3, 48).transpose(0, 1)[:, :-1]
    target, one = target.view(3, 4)[:, :-1].int(), torch.ones((), device=device)
    options = {"beta": beta, "num_classes": 37}
    expected = distillation_oracle(logits, teacher, target, **options)
    loss, statistics = forward(logits, teacher, target, **options)
    grad = backward(one, logits, teacher, target, statistics, **options)
    assert_distillation(loss, grad, expected)
    copy = logits.clone()
    backward_(one, copy, teacher, target, statistics, **options)
    assert_distillation(loss, copy, expected)
    dense = logits.transpose(0, 2)  # no two strides describe its rows, whose classes lie apart: a copy
    loss = with_grad_(dense.transpose(0, 2), teacher, target, one, **options)
    assert_distillation(loss, logits, expected)
    nothing = forward(logits[:0], teacher[:0], target[:0], beta=beta, num_classes=37)
    assert nothing[0].shape == (0, 3) and nothing[1].shape == (11, 0, 3)


def test_the_same_distribution(device):
    """No divergence, and no gradient."""
    logits, _, target = problem(device, 3, torch.float32, torch.float32, (1000,) * 3)
    target[:] = 0
    for beta in BETAS:
        loss, grad = with_grad(logits, logits.clone(), target, torch.ones((), device=device), beta=beta)
        assert loss.abs().max() < 1e-5 and grad.abs().max() < 1e-6


@pytest.mark.parametrize("beta", BETAS)
def test_bits_repeat(device, beta):
    logits, teacher, target = problem(device, 5, torch.bfloat16, torch.bfloat16, (5000,) * 3)
    one, options = torch.ones((), device=device), {"beta": beta, "hard_weight": 0.5}
    first = with_grad(logits, teacher, target, one, **options)
    for _ in range(2):
        assert all(map(torch.equal, first, with_grad(logits, teacher, target, one, **options)))
