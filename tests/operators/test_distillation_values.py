"""Distillation of given logits: values of the operators, masked classes, rows that pass nothing back."""

import math

import pytest
import torch
from flat_options import FlatOptions
from helpers.covering import covering

from xent_ops.kernels import reference_distillation
from xent_ops.testing import assert_distillation, distillation_oracle, realistic_logits

pytestmark = pytest.mark.interpreter

ops = torch.ops.xent
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
    loss, statistics = ops.distillation_forward(logits, teacher, target, **options)
    assert loss.dtype == statistics.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    grad = ops.distillation_backward(scale, logits, teacher, target, statistics, **options)
    assert grad.dtype == dtype and grad.is_contiguous()
    assert_distillation(loss, grad, expected)
    at_once, made = ops.distillation_with_grad(logits, teacher, target, scale, **options)
    assert torch.equal(logits, before)
    assert_distillation(at_once, made, expected)
    over, version = logits.clone(), logits._version
    assert ops.distillation_backward_(scale, over, teacher, target, statistics, **options) is None
    assert_distillation(loss, over, expected)
    assert_distillation(ops.distillation_with_grad_(logits, teacher, target, scale, **options), logits, expected)
    assert logits._version > version


def test_plain_torch(device):
    """The functions that serve where there are no kernels, which the interpreter's process does not run."""
    plain = FlatOptions(reference_distillation)
    for beta in BETAS:
        for widths in WIDTHS[:4]:
            for options in OPTIONS.values():
                logits, teacher, target = problem(device, 5, torch.float32, torch.bfloat16, widths)
                options = given(widths, **{**options, "ignore_index": -100, "beta": beta})
                loss, grad = plain.distillation_with_grad(logits, teacher, target, torch.tensor(2.0), **options)
                assert_distillation(loss, grad, distillation_oracle(logits, teacher, target, grad_loss=2.0, **options))


@pytest.mark.parametrize("beta", BETAS)
def test_rows_that_lie_apart(device, beta):
    """Views, another dtype of the teacher, targets of another dtype, an upstream gradient of a scalar, and of none."""
    logits, teacher, target = problem(device, 12, torch.bfloat16, torch.float32, (40, 40, 48))
    logits, teacher = logits.view(3, 4, 40)[:, :-1], teacher.view(4, 3, 48).transpose(0, 1)[:, :-1]
    target, one = target.view(3, 4)[:, :-1].int(), torch.ones((), device=device)
    options = {"beta": beta, "num_classes": 37}
    expected = distillation_oracle(logits, teacher, target, **options)
    loss, statistics = ops.distillation_forward(logits, teacher, target, **options)
    grad = ops.distillation_backward(one, logits, teacher, target, statistics, **options)
    assert_distillation(loss, grad, expected)
    copy = logits.clone()
    ops.distillation_backward_(one, copy, teacher, target, statistics, **options)
    assert_distillation(loss, copy, expected)
    dense = logits.transpose(0, 2)  # no two strides describe its rows, whose classes lie apart: a copy
    with_grad = ops.distillation_with_grad_(dense.transpose(0, 2), teacher, target, one, **options)
    assert_distillation(with_grad, logits, expected)
    nothing = ops.distillation_forward(logits[:0], teacher[:0], target[:0], beta=beta, num_classes=37)
    assert nothing[0].shape == (0, 3) and nothing[1].shape == (4, 0, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_classes_that_both_mask(device, beta, dtype):
    """As if they were not there, wherever they are: whole lanes and tiles at the start, the end, between."""
    rows, classes = 2, 5000
    logits, teacher, target = problem(device, rows, dtype, dtype, (classes,) * 3)
    masked = torch.zeros(classes, dtype=torch.bool, device=device)
    masked[:4100], masked[4500:4600], masked[4990:] = True, True, True
    target[:] = 4200
    options = {"beta": beta, "hard_weight": 0.5, "temperature": 2.0}
    left, left_teacher = logits[:, ~masked], teacher[:, ~masked]
    expected = distillation_oracle(left, left_teacher, target - 4100, **options)
    logits[:, masked] = teacher[:, masked] = -INF
    one = torch.ones((), device=device)
    loss, statistics = ops.distillation_forward(logits, teacher, target, **options)
    for made in (
        (loss, ops.distillation_backward(one, logits, teacher, target, statistics, **options)),
        ops.distillation_with_grad(logits, teacher, target, one, **options),
    ):
        assert_distillation(made[0], made[1][:, ~masked], expected)
        assert not made[1][:, masked].any()


@pytest.mark.parametrize("place", [0, 3, 299])
@pytest.mark.parametrize("beta", BETAS)
def test_classes_that_one_masks(device, beta, place):
    """Infinite where the formula says so, in the loss and in the gradient; never NaN."""
    one, target = torch.ones((), device=device), torch.zeros(1, dtype=torch.int64, device=device)
    plain = torch.zeros(1, 300, device=device)
    plain[0, 7] = 2.0
    masked = plain.clone()
    masked[0, place] = -INF
    full, rest = plain[0].double().softmax(-1), masked[0].double().softmax(-1)
    for student, teacher, infinite in ((plain, masked, beta == 1.0), (masked, plain, beta == 0.0)):
        loss, statistics = ops.distillation_forward(student, teacher, target, beta=beta)
        grads = (
            ops.distillation_backward(one, student, teacher, target, statistics, beta=beta),
            ops.distillation_with_grad(student, teacher, target, one, beta=beta)[1],
        )
        assert not loss.isnan() and (loss.item() == INF) == infinite
        s, t = (full, rest) if student is plain else (rest, full)
        if 0.0 < beta < 1.0:
            m = (1 - beta) * s + beta * t
            ratio = torch.where(s > 0, (s / m).log(), 0.0)
            of_student = (s * ratio).sum()
            wanted = (1 - beta) * s * (ratio - of_student)
            of_teacher = (t * torch.where(t > 0, (t / m).log(), 0.0)).sum()
            assert math.isclose(loss.item(), beta * of_teacher + (1 - beta) * of_student, abs_tol=1e-6)
        elif beta == 0.0:
            wanted = s - t
        elif infinite:
            wanted = torch.full_like(s, -INF)
            wanted[place] = INF
        else:
            ratio = torch.where(s > 0, (s / t).log(), 0.0)
            wanted = s * (ratio - (s * ratio).sum())
        for grad in grads:
            torch.testing.assert_close(grad[0].double(), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("beta", BETAS)
def test_rows_that_pass_nothing_back(device, beta):
    """Ignored rows, and those of an upstream gradient of 0: exact zeros, whatever the logits hold."""
    logits, teacher, _ = problem(device, 4, torch.float32, torch.float32, (40, 40, 40))
    logits[0], teacher[1], logits[2] = math.nan, INF, math.nan
    target = torch.tensor([-100, -100, 5, 5], device=device)
    scale = torch.tensor([1.0, 1.0, 0.0, 2.0], device=device)
    loss, grad = ops.distillation_with_grad(logits, teacher, target, scale, beta=beta, hard_weight=1.0)
    row_loss, statistics = ops.distillation_forward(logits, teacher, target, beta=beta, hard_weight=1.0)
    again = ops.distillation_backward(scale, logits, teacher, target, statistics, beta=beta, hard_weight=1.0)
    for losses, made in ((loss, grad), (row_loss, again)):
        assert losses[:2].tolist() == [0.0, 0.0] and losses[2].isnan() and losses[3].isfinite()
        assert not made[:3].any() and made[3].isfinite().all() and made[3].any()


@pytest.mark.parametrize("beta", BETAS)
def test_far_apart(device, beta):
    """Probabilities below the least float32, maxima that move late, logits of 1e4: finite and right."""
    logits = torch.zeros(2, 4000, device=device)
    logits[0] = torch.linspace(-3000, 3000, 4000)
    logits[1] = torch.linspace(1e4, -1e4, 4000)
    teacher, target = logits.flip(0) * 0.5, torch.zeros(2, dtype=torch.int64, device=device)
    one = torch.ones((), device=device)
    loss, grad = ops.distillation_with_grad(logits, teacher, target, one, beta=beta)
    row_loss, statistics = ops.distillation_forward(logits, teacher, target, beta=beta)
    again = ops.distillation_backward(one, logits, teacher, target, statistics, beta=beta)
    expected = distillation_oracle(logits, teacher, target, beta=beta)
    assert_distillation(loss, grad, expected)
    assert_distillation(row_loss, again, expected)


def test_the_same_distribution(device):
    """No divergence, and no gradient."""
    logits, _, target = problem(device, 3, torch.float32, torch.float32, (1000,) * 3)
    target[:] = 0
    for beta in BETAS:
        loss, grad = ops.distillation_with_grad(
            logits, logits.clone(), target, torch.ones((), device=device), beta=beta
        )
        assert loss.abs().max() < 1e-5 and grad.abs().max() < 1e-6


@pytest.mark.parametrize("beta", BETAS)
def test_bits_repeat(device, beta):
    logits, teacher, target = problem(device, 5, torch.bfloat16, torch.bfloat16, (5000,) * 3)
    one, options = torch.ones((), device=device), {"beta": beta, "hard_weight": 0.5}
    first = ops.distillation_with_grad(logits, teacher, target, one, **options)
    for _ in range(2):
        assert all(map(torch.equal, first, ops.distillation_with_grad(logits, teacher, target, one, **options)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_targets_out_of_range(device, raises_out_of_range, dtype):
    """Of a hard loss an error, or NaN on a GPU; without one a target only says what is ignored."""
    logits, teacher, target = problem(device, 3, dtype, dtype, (10, 10, 12))
    target[0], one = 11, torch.ones((), device=device)
    options = {"num_classes": 10}
    assert ops.distillation_with_grad(logits, teacher, target, one, **options)[0].isfinite().all()
    options["hard_weight"] = 0.5
    if raises_out_of_range:
        for call in (
            lambda: ops.distillation_forward(logits, teacher, target, **options),
            lambda: ops.distillation_with_grad(logits, teacher, target, one, **options),
        ):
            with pytest.raises(IndexError, match="target 11 is out of bounds: valid are 0 to 9"):
                call()
        return
    loss, statistics = ops.distillation_forward(logits, teacher, target, **options)
    grads = (
        ops.distillation_with_grad(logits, teacher, target, one, **options)[1],
        ops.distillation_backward(one, logits, teacher, target, statistics, **options),
    )
    assert loss[0].isnan() and loss[1:].isfinite().all()
    for grad in grads:
        assert grad[0, :10].isnan().all() and grad[1:].isfinite().all()
