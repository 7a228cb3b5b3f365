"""Distillation where numbers are not ordinary, of all classes and of slices of them: masked classes, far logits, no class."""

import math

import pytest
import torch
from fixed_losses import backward, fixed, forward, with_grad, with_grad_
from helpers.covering import covering
from test_distillation_shard import gradients, joined, problem, slices
from test_distillation_values import BETAS, DTYPES, INF

from xent_ops.testing import assert_distillation, distillation_oracle

pytestmark = pytest.mark.interpreter


def of_all(logits, teacher, target, scale, starts, **options):
    """(losses, gradient) of each operator and of its in-place form."""
    loss, statistics = forward(logits, teacher, target, **options)
    made = [(loss, backward(scale, logits, teacher, target, statistics, **options))]
    made.append(with_grad(logits, teacher, target, scale, **options))
    over = logits.clone()
    made.append((with_grad_(over, teacher, target, scale, **options), over))
    return made


def of_slices(logits, teacher, target, scale, starts, **options):
    """The same, of slices from ``starts`` on whose statistics are joined."""
    how, parts = fixed(num_classes=logits.shape[-1], **options), slices(logits, teacher, starts)
    rows = joined(parts, target, how.spec)
    return [(how.of(rows.values), torch.cat(made, -1)) for made in gradients(parts, target, rows, how, scale)]


WAYS = [of_all, of_slices]


@pytest.fixture(params=WAYS, ids=["all classes", "slices"])
def run(request):
    return request.param


@pytest.mark.parametrize("run, beta, dtype", covering(WAYS, BETAS, DTYPES))
def test_classes_that_both_mask(device, run, beta, dtype):
    """As if they were not there: whole lanes, tiles and slices at the start, the end, between."""
    logits, teacher, target = problem(device, dtype, 5000, rows=2)
    masked = torch.zeros(5000, dtype=torch.bool, device=device)
    masked[:4100], masked[4500:4600], masked[4990:] = True, True, True
    target[:] = 4200
    options, one = {"beta": beta, "hard_weight": 0.5, "temperature": 2.0}, torch.ones((), device=device)
    expected = distillation_oracle(logits[:, ~masked], teacher[:, ~masked], target - 4100, **options)
    logits[:, masked] = teacher[:, masked] = -INF
    for loss, grad in run(logits, teacher, target, one, (0, 1000, 4100, 4500, 4600), **options):
        assert_distillation(loss, grad[:, ~masked], expected)
        assert not grad[:, masked].any()


@pytest.mark.parametrize("place", [slice(0, 1), slice(3, 4), slice(299, 300), slice(0, 150)], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_classes_that_one_masks(device, run, beta, place):
    """Infinite where the formula says so, in the loss and in the gradient; never NaN. The last place is a slice."""
    one, target = torch.ones((), device=device), torch.zeros(1, dtype=torch.int64, device=device)
    plain = torch.zeros(1, 300, device=device)
    plain[0, 7] = 2.0
    masked = plain.clone()
    masked[0, place] = -INF
    full, rest = plain[0].double().softmax(-1), masked[0].double().softmax(-1)
    for student, teacher, infinite in ((plain, masked, beta == 1.0), (masked, plain, beta == 0.0)):
        s, t = (full, rest) if student is plain else (rest, full)
        if 0.0 < beta < 1.0:
            m = (1 - beta) * s + beta * t
            ratio = torch.where(s > 0, (s / m).log(), 0.0)
            of_student = (s * ratio).sum()
            wanted = (1 - beta) * s * (ratio - of_student)
            of_teacher = (t * torch.where(t > 0, (t / m).log(), 0.0)).sum()
            value = beta * of_teacher + (1 - beta) * of_student
        elif beta == 0.0:
            wanted, value = s - t, None
        elif infinite:
            wanted, value = torch.full_like(s, -INF), None
            wanted[place] = INF
        else:
            ratio = torch.where(s > 0, (s / t).log(), 0.0)
            wanted, value = s * (ratio - (s * ratio).sum()), None
        for loss, grad in run(student, teacher, target, one, (0, 150), beta=beta):
            assert not loss.isnan() and (loss.item() == INF) == infinite
            assert value is None or math.isclose(loss.item(), value, abs_tol=1e-6)
            torch.testing.assert_close(grad[0].double(), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("beta", BETAS)
def test_rows_that_pass_nothing_back(device, run, beta):
    """Ignored rows, and those of an upstream gradient of 0: exact zeros, whatever the logits hold."""
    logits, teacher, _ = problem(device, torch.float32, 40, rows=4)
    logits[0], teacher[1], logits[2] = math.nan, INF, math.nan
    target = torch.tensor([-100, -100, 5, 35], device=device)
    scale = torch.tensor([1.0, 1.0, 0.0, 2.0], device=device)
    for losses, grad in run(logits, teacher, target, scale, (0, 0, 17), beta=beta, hard_weight=1.0):
        assert losses[:2].tolist() == [0.0, 0.0] and losses[2].isnan() and losses[3].isfinite()
        assert not grad[:3].any() and grad[3].isfinite().all() and grad[3].any()


@pytest.mark.parametrize("beta", BETAS)
def test_far_apart(device, run, beta):
    """Probabilities below the least float32, maxima that move late, slices whose share is none or all, logits of 1e4."""
    classes = 4000 if run is of_all else 400
    logits = torch.zeros(2, classes, device=device)
    logits[0] = torch.linspace(-3000, 3000, classes)
    logits[1] = torch.linspace(1e4, -1e4, classes)
    teacher, target = logits.flip(0) * 0.5, torch.zeros(2, dtype=torch.int64, device=device)
    expected = distillation_oracle(logits, teacher, target, beta=beta)
    for made in run(logits, teacher, target, torch.ones((), device=device), (0, 3, 200, 390), beta=beta):
        assert_distillation(*made, expected)


def test_a_target_in_the_padding_of_a_head(device, raises_out_of_range):
    """It is none of num_classes, though the student has the column."""
    logits, teacher, _ = problem(device, torch.float32, 12, rows=3)
    target, one = torch.tensor([11, -100, 5], device=device), torch.ones((), device=device)
    assert all(loss.isfinite().all() for loss, _ in of_all(logits, teacher, target, one, (), num_classes=10))
    options = {"num_classes": 10, "hard_weight": 0.5}
    if raises_out_of_range:
        for call in (
            lambda: forward(logits, teacher, target, **options),
            lambda: with_grad(logits, teacher, target, one, **options),
        ):
            with pytest.raises(IndexError, match="target 11 is out of bounds: valid are 0 to 9"):
                call()
        return
    for loss, grad in of_all(logits, teacher, target, one, (), **options):
        assert loss[0].isnan() and loss[1:].isfinite().all()
        assert grad[0, :10].isnan().all() and grad[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_targets_out_of_range(device, run, raises_out_of_range, dtype):
    """Of a hard loss an error, or NaN on a GPU; without one a target only says what is ignored."""
    logits, teacher, target = problem(device, dtype, 40, rows=3)
    target[0], one = 40, torch.ones((), device=device)
    assert all(loss.isfinite().all() for loss, _ in run(logits, teacher, target, one, (0, 17)))
    if raises_out_of_range:
        with pytest.raises(IndexError, match="target 40 is out of bounds: valid are 0 to 39"):
            run(logits, teacher, target, one, (0, 17), hard_weight=0.5)
        with pytest.raises(IndexError, match="target 40 is out of bounds: valid are 0 to 39"):
            with_grad(logits, teacher, target, one, hard_weight=0.5)
        return
    for loss, grad in run(logits, teacher, target, one, (0, 17), hard_weight=0.5):
        assert loss[0].isnan() and loss[1:].isfinite().all()
        assert grad[0].isnan().all() and grad[1:].isfinite().all()
