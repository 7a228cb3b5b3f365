"""Distillation over slices of the classes, as ranks hold them: parts, join and gradients give what all classes give."""

import pytest
import torch
from fixed_losses import fixed
from helpers.covering import covering
from helpers.interpreter import INTERPRETED
from test_distillation_values import BETAS, DTYPES, OPTIONS, long_in_float64

from xent_ops.head import divergence_chunk
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


def slices(logits, teacher, starts, padding=0):
    """(class_start, student, teacher) of each slice; behind the last class columns of padding, other ones of each."""
    ends = [*starts[1:], logits.shape[-1]]
    found = [(a, logits[:, a:b].clone(), teacher[:, a:b].clone()) for a, b in zip(starts, ends, strict=True)]
    if padding:
        start, *last = found[-1]
        wider = [torch.nn.functional.pad(x, (0, more), value=1e3) for x, more in zip(last, (padding, 3), strict=True)]
        found[-1] = (start, *wider)
    return found


def joined(parts, target, spec):
    """As the loop over ranks does it, columns behind the classes cut off."""
    cut = [
        (start, *(logits[:, : min(logits.shape[1], spec.num_classes - start)] for logits in both))
        for start, *both in parts
    ]
    made = [divergence_chunk.slice_statistics(*both, target, start, False, spec) for start, *both in cut]
    assert {tuple(one.shape) for one in made} == {(1, divergence_chunk.width(len(target), spec, False))}
    rows = divergence_chunk.join(torch.cat(made), target, cut[0][0], spec, False)
    sums = [divergence_chunk.second_sums(*both, target, rows, start, spec) for start, *both in cut]
    return rows if sums[0] is None else divergence_chunk.add_second_sums(rows, torch.cat(sums), spec)


def gradients(parts, target, rows, how, scale):
    """By the operator and by its twin, each over all slices."""
    apart, over, upstream = [], [], how.upstream(scale.to(rows.values.dtype).expand(target.shape))
    for start, logits, teacher in parts:
        given = (teacher, target, rows.statistics, start)
        apart.append(ops.divergences_backward(upstream, logits, *given, **how.spec.keywords()))
        assert ops.divergences_backward_(upstream, logits, *given, **how.spec.keywords()) is None
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
    how = fixed(num_classes=classes, **options)
    for padding in (5,) if INTERPRETED else (0, 5):
        parts = slices(logits, teacher, starts, padding)
        rows = joined(parts, target, how.spec)
        for made in gradients(parts, target, rows, how, scale):
            assert all(grad.dtype == dtype for grad in made)
            if padding:
                assert not made[-1][:, -padding:].any(), "padding got a gradient"
            assert_distillation(how.of(rows.values), torch.cat(made, -1)[:, :classes], expected)


@pytest.mark.parametrize("beta", BETAS)
def test_slices_that_do_not_tile(device, beta):
    """NaN in every loss and in the gradients, but for ignored rows."""
    logits, teacher, target = problem(device, torch.float32, 40)
    how = fixed(num_classes=40, beta=beta)
    for parts in (slices(logits, teacher, (0, 17))[1:], 2 * slices(logits, teacher, (0,))):
        rows = joined(parts, target, how.spec)
        assert how.of(rows.values).isnan().equal(target != -100)
        grad = gradients(parts[:1], target, rows, how, torch.ones((), device=device))[0][0]
        assert grad.isnan().all(-1).equal(target != -100) and not grad[target == -100].any()


def test_errors(device):
    """Beside those that follow from the contract."""
    logits, teacher, target = problem(device, torch.float32, 40)
    statistics = torch.zeros(7, len(target), device=device)
    forward = ops.divergences_forward
    text = "logits has 40 of the 60 classes from class_start=5 on but teacher_logits 39"
    with pytest.raises(ValueError, match=text):
        forward(logits, teacher[:, 1:], target, None, None, 5, num_classes=60)
    with pytest.raises(ValueError, match="mixture or overlap among the fields"):
        forward(logits, teacher, target, None, statistics, 5, num_classes=60)
    with pytest.raises(RuntimeError, match="over a slice of the classes have no derivative"):
        forward(logits.requires_grad_(), teacher, target, None, None, 5, num_classes=60)[0].sum().backward()
