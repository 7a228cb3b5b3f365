"""Distillation over slices of the classes, as ranks hold them: parts, join and gradients give what all classes give."""

import math

import pytest
import torch
from helpers.covering import covering
from helpers.interpreter import INTERPRETED
from test_distillation_values import BETAS, DTYPES, INF, OPTIONS, long_in_float64

from xent_ops.head import distillation_shard
from xent_ops.kernels.distillation import Distillation
from xent_ops.kernels.options import as_record
from xent_ops.testing import assert_distillation, distillation_oracle, realistic_logits

pytestmark = pytest.mark.interpreter

ops = torch.ops.xent
# Where slices start: without classes, of one class, of several tiles.
PLACES = [(203, (0, 0, 7, 120)), (203, (0,)), (203, (0, 1, 128)), (9001, (0, 37, 4099))]


def problem(device, dtype, classes, rows=6):
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (realistic_logits(rows, classes, dtype=dtype, seed=seed) for seed in (1, 2))
    target = torch.randint(classes, (rows,), generator=generator)
    target[1::3] = -100
    target[0], target[-1] = 0, classes - 1
    return logits.to(device), teacher.to(device), target.to(device)


def record(classes, **options):
    """The options of a call as a record."""
    return Distillation(**as_record({"num_classes": classes, **options}))


def slices(logits, teacher, starts, padding=0):
    """(class_start, student, teacher) of each slice; behind the last class columns of padding, other ones of each."""
    ends = [*starts[1:], logits.shape[-1]]
    found = [(a, logits[:, a:b].clone(), teacher[:, a:b].clone()) for a, b in zip(starts, ends, strict=True)]
    if padding:
        start, *last = found[-1]
        wider = [torch.nn.functional.pad(x, (0, more), value=1e3) for x, more in zip(last, (padding, 3), strict=True)]
        found[-1] = (start, *wider)
    return found


def joined(parts, target, how):
    """As the loop over ranks does it, columns behind the classes cut off."""
    cut = [
        (start, *(logits[:, : min(logits.shape[1], how.num_classes - start)] for logits in both))
        for start, *both in parts
    ]
    made = [distillation_shard.chunk_statistics(*both, target, start, how) for start, *both in cut]
    assert {tuple(one.shape) for one in made} == {(1, distillation_shard.width(len(target), how))}
    rows = distillation_shard.join_statistics(torch.cat(made), target, how)
    sums = [distillation_shard.mixture_sums(*both, target, rows, start, how) for start, *both in cut]
    return rows if sums[0] is None else distillation_shard.add_mixture_sums(rows, torch.cat(sums), target, how)


def gradients(parts, target, rows, how, scale):
    """By the operator and by its twin, each over all slices."""
    apart, over = [], []
    for start, logits, teacher in parts:
        given = (teacher, target, rows.statistics, start)
        apart.append(ops.distillation_backward(scale, logits, *given, **how.keywords()))
        assert ops.distillation_backward_(scale, logits, *given, **how.keywords()) is None
        over.append(logits)
    return apart, over


@pytest.mark.parametrize(
    "place, name, beta, dtype", covering(PLACES, OPTIONS, BETAS, DTYPES, but=long_in_float64), ids=str
)
def test_values(device, place, name, beta, dtype):
    classes, starts = place
    logits, teacher, target = problem(device, dtype, classes, rows=4)
    options = {"beta": beta, **OPTIONS[name]}
    target = torch.where(target == -100, options.get("ignore_index", -100), target)
    scale = torch.randn(len(target), generator=torch.Generator().manual_seed(3)).to(device)
    expected = distillation_oracle(logits, teacher, target, grad_loss=scale, **options)
    how = record(classes, **options)
    for padding in (5,) if INTERPRETED else (0, 5):
        parts = slices(logits, teacher, starts, padding)
        rows = joined(parts, target, how)
        for made in gradients(parts, target, rows, how, scale):
            assert all(grad.dtype == dtype for grad in made)
            if padding:
                assert not made[-1][:, -padding:].any(), "padding got a gradient"
            assert_distillation(rows.loss, torch.cat(made, -1)[:, :classes], expected)


@pytest.mark.parametrize("hard_weight", [0.0, 0.5])
@pytest.mark.parametrize("beta", BETAS)
def test_a_slice_that_both_mask(device, beta, hard_weight):
    """It has no part in the loss of the others, and no gradient."""
    logits, teacher, target = problem(device, torch.float32, 203)
    target[:] = torch.tensor([0, 1, -100, 59, 120, 202], device=device)
    masked = slice(60, 120)
    kept = torch.ones(203, dtype=torch.bool, device=device)
    kept[masked] = False
    left = torch.where(target >= 120, target - 60, target)
    options = {"beta": beta, "hard_weight": hard_weight, "temperature": 2.0}
    expected = distillation_oracle(logits[:, kept], teacher[:, kept], left, **options)
    logits[:, masked] = teacher[:, masked] = -INF
    how, parts = record(203, **options), slices(logits, teacher, (0, 60, 120))
    rows = joined(parts, target, how)
    for made in gradients(parts, target, rows, how, torch.ones((), device=device)):
        grad = torch.cat(made, -1)
        assert_distillation(rows.loss, grad[:, kept], expected)
        assert not grad[:, masked].any()


@pytest.mark.parametrize("place", [0, 3, 60])
@pytest.mark.parametrize("whole", [False, True], ids=["class", "slice"])
@pytest.mark.parametrize("beta", BETAS)
def test_what_one_masks(device, beta, whole, place):
    """One class or all of a slice: infinite where it is for all classes at once, in the loss and in the gradient."""
    target = torch.zeros(1, dtype=torch.int64, device=device)
    one, plain = torch.ones((), device=device), torch.linspace(-1, 1, 120, device=device).repeat(1, 1)
    masked, how = plain.clone(), record(120, beta=beta)
    masked[:, place // 60 * 60 : place // 60 * 60 + 60] = masked[:, place // 60 * 60 : place // 60 * 60 + 60] - 0.5
    masked[:, slice(place // 60 * 60, place // 60 * 60 + 60) if whole else place] = -INF
    for student, teacher in ((plain, masked), (masked, plain)):
        loss, statistics = ops.distillation_forward(student, teacher, target, beta=beta)
        grad = ops.distillation_backward(one, student, teacher, target, statistics, beta=beta)
        parts = slices(student, teacher, (0, 60))
        rows = joined(parts, target, how)
        torch.testing.assert_close(rows.loss, loss, rtol=1e-5, atol=1e-6)
        assert not loss.isnan()
        for made in gradients(parts, target, rows, how, one):
            torch.testing.assert_close(torch.cat(made, -1), grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("beta", BETAS)
def test_rows_that_pass_nothing_back(device, beta):
    """Ignored rows: exact zeros, whatever the logits hold. And of an upstream gradient of 0."""
    logits, teacher, _ = problem(device, torch.float32, 40, 4)
    logits[0], teacher[1], logits[2] = math.nan, INF, math.nan
    target = torch.tensor([-100, -100, 5, 35], device=device)
    scale = torch.tensor([1.0, 1.0, 0.0, 2.0], device=device)
    how, parts = record(40, beta=beta, hard_weight=1.0), slices(logits, teacher, (0, 0, 17))
    rows = joined(parts, target, how)
    assert rows.loss[:2].tolist() == [0.0, 0.0] and rows.loss[2].isnan() and rows.loss[3].isfinite()
    for made in gradients(parts, target, rows, how, scale):
        grad = torch.cat(made, -1)
        assert not grad[:3].any() and grad[3].isfinite().all() and grad[3].any()


@pytest.mark.parametrize("beta", BETAS)
def test_far_apart(device, beta):
    """Probabilities below the least float32, slices whose share is none, logits of 1e4."""
    logits = torch.zeros(2, 400, device=device)
    logits[0] = torch.linspace(-3000, 3000, 400)
    logits[1] = torch.linspace(1e4, -1e4, 400)
    teacher, target = logits.flip(0) * 0.5, torch.zeros(2, dtype=torch.int64, device=device)
    expected, how = distillation_oracle(logits, teacher, target, beta=beta), record(400, beta=beta)
    parts = slices(logits, teacher, (0, 3, 200, 390))
    rows = joined(parts, target, how)
    for made in gradients(parts, target, rows, how, torch.ones((), device=device)):
        assert_distillation(rows.loss, torch.cat(made, -1), expected)


@pytest.mark.parametrize("beta", BETAS)
def test_slices_that_do_not_tile(device, beta):
    """NaN in every loss and in the gradients, but for ignored rows."""
    logits, teacher, target = problem(device, torch.float32, 40)
    how = record(40, beta=beta)
    for parts in (slices(logits, teacher, (0, 17))[1:], 2 * slices(logits, teacher, (0,))):
        rows = joined(parts, target, how)
        assert rows.loss.isnan().equal(target != -100)
        grad = gradients(parts[:1], target, rows, how, torch.ones((), device=device))[0][0]
        assert grad.isnan().all(-1).equal(target != -100) and not grad[target == -100].any()


def test_targets_that_are_no_class(device, raises_out_of_range):
    logits, teacher, target = problem(device, torch.float32, 40)
    how, parts = record(40, hard_weight=0.5), slices(logits, teacher, (0, 17))
    target[0] = 40
    if raises_out_of_range:
        with pytest.raises(IndexError, match="target 40 is out of bounds: valid are 0 to 39"):
            joined(parts, target, how)
        return
    rows = joined(parts, target, how)
    assert rows.loss[0].isnan() and rows.loss[1:].isfinite().all()
    for made in gradients(parts, target, rows, how, torch.ones((), device=device)):
        assert made[0][0].isnan().all() and made[0][1:].isfinite().all()


def test_errors(device):
    logits, teacher, target = problem(device, torch.float32, 40)
    statistics = torch.zeros(4, len(target), device=device)
    forward = ops.distillation_forward
    for call, text in (
        (lambda: forward(logits, teacher, target, None, 5), "num_classes must say how many classes all have"),
        (lambda: forward(logits, teacher, target, None, 60, num_classes=60), "lies beyond num_classes=60"),
        (
            lambda: forward(logits, teacher[:, 1:], target, None, 5, num_classes=60),
            "logits has 40 of the 60 classes from class_start=5 on but teacher_logits 39",
        ),
        (lambda: forward(logits, teacher, target, statistics, beta=0.5), "joined statistics are for a slice"),
        (lambda: forward(logits, teacher, target, statistics, 5, num_classes=60), "at a beta between 0 and 1"),
        (lambda: forward(logits[:, :0], teacher[:, :0], target), "0 classes; expected at least 1"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(RuntimeError, match="over a slice of the classes has no derivative"):
        forward(logits.requires_grad_(), teacher, target, None, 5, num_classes=60)[0].sum().backward()
