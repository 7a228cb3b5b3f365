"""Distillation over slices of the classes, as ranks hold them: parts, join and gradients give what all classes give."""

import itertools

import pytest
import torch
from fixed_losses import fixed
from helpers.covering import covering
from helpers.divergence_oracle import divergences
from helpers.interpreter import INTERPRETED
from test_distillation_values import BETAS, DTYPES, OPTIONS, long_in_float64

from xent_ops.head import divergence_chunk
from xent_ops.head.divergences import TeacherRows, teacher_rows, tops
from xent_ops.kernels.divergences import FIELDS, Divergences
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
    made = [divergence_chunk.slice_statistics(x, TeacherRows(y, y), target, start, False, spec) for start, x, y in cut]
    rows = divergence_chunk.join(torch.cat(made), target, spec, False)
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


@pytest.mark.parametrize("offset", [1e4, 1e6, -1e9])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_offsets(device, offset, temperature):
    """Of rows of the student, of the teacher, of both; all fields beside float64 of the same logits."""
    logits, teacher, target = problem(device, torch.float32, 203)
    logits[0::3] += offset
    teacher[0:2] += offset
    spec = Divergences(num_classes=203, temperature=temperature, fields=",".join(FIELDS))
    rows = joined(slices(logits, teacher, (0, 7, 120)), target, spec)
    wide = logits.double().cpu().requires_grad_()
    wanted = torch.stack(divergences(wide, teacher.double().cpu(), target.cpu(), temperature=temperature)[:5])
    counted = (target != -100).cpu()
    found = rows.values.double().cpu()
    torch.testing.assert_close(found[:, counted], wanted.detach()[:, counted], rtol=1e-6, atol=2e-6)
    upstream = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    (wanted_grad,) = torch.autograd.grad((wanted * upstream * counted).sum(), wide)
    parts = [
        ops.divergences_backward(upstream.to(device), x, y, target, rows.statistics, start, **spec.keywords())
        for start, x, y in slices(logits, teacher, (0, 7, 120))
    ]
    error = (torch.cat(parts, -1).double().cpu() - wanted_grad).norm(dim=-1)
    assert (error < 2e-6 * wanted_grad.norm(dim=-1).clamp(min=1e-2)).all(), error


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


def test_a_draft_vocabulary(device):
    """Values, statistics and tops of slices with some of their teacher's classes are those of one slice with all."""
    logits, teacher, target = problem(device, torch.float32, 40)
    teacher, logits = teacher[:, :40], logits[:, :11].contiguous()
    target = torch.where(target == -100, target, target % 11)
    classes = torch.tensor([1, 4, 5, 17, 18, 30, 31, 33, 36, 38, 39], device=device)
    teacher[2, 25], teacher[3, 4], logits[3, 1] = 50.0, 50.0, 50.0  # a top that the draft lacks, one that it agrees on
    spec = Divergences(num_classes=11, temperature=2.0, fields=",".join(FIELDS))
    of_all = spec._replace(num_classes=None)

    def of(*ends):
        """Of slices of the teacher's classes from 0 to the first of the ends, from there to the next..."""
        made, cut = [], []
        for start, end in itertools.pairwise((0, *ends)):
            mine = (classes >= start) & (classes < end)
            first, ids = int((classes < start).sum()), classes[mine] - start
            given = teacher_rows(teacher[:, start:end].contiguous(), target, ids, True, of_all)
            x = logits[:, first : first + len(ids)].contiguous()
            made.append(divergence_chunk.slice_statistics(x, given, target, first, True, spec, ids))
            cut.append((x, given.logits.contiguous(), first))
        rows = divergence_chunk.join(torch.cat(made), target, spec, True, True)
        sums = [divergence_chunk.second_sums(x, y, target, rows, first, spec) for x, y, first in cut]
        return divergence_chunk.add_second_sums(rows, torch.cat(sums), spec)

    counted = target != -100
    given = teacher_rows(teacher, target, classes, True, of_all)
    values, statistics = ops.divergences_forward(logits, given.logits, target, given.lse, **of_all.keywords())
    found = tops(logits, given, target, classes, of_all)
    assert found[1, 2] == 0 and found[0, 3] == 1
    for ends in ((40,), (3, 17, 40), (6, 17, 17, 30, 40), (1, 40), (0, 40, 40)):
        rows = of(*ends)
        torch.testing.assert_close(rows.values, values)
        torch.testing.assert_close(rows.statistics[:, counted], statistics[:, counted])
        assert rows.tops[:, counted].equal(found[:, counted])
    classes = classes.clone()
    classes[3] = 18  # twice
    assert of(17, 40).values[:, counted].isnan().all()


def test_errors(device):
    """Beside those that follow from the contract."""
    logits, teacher, target = problem(device, torch.float32, 40)
    statistics = torch.zeros(11, len(target), device=device)
    forward = ops.divergences_forward
    text = "logits has 40 of the 60 classes from class_start=5 on but teacher_logits 39"
    with pytest.raises(ValueError, match=text):
        forward(logits, teacher[:, 1:], target, None, None, 5, num_classes=60)
    with pytest.raises(ValueError, match="mixture or overlap among the fields"):
        forward(logits, teacher, target, None, statistics, 5, num_classes=60)
    with pytest.raises(RuntimeError, match="over a slice of the classes have no derivative"):
        forward(logits.requires_grad_(), teacher, target, None, None, 5, num_classes=60)[0].sum().backward()
