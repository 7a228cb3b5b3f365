"""Divergences of rows in C++ against plain torch."""

import math

import problems
import pytest
import torch
from helpers.option_values import VALUES
from hypothesis import given
from hypothesis import strategies as st
from problems import FLOATS, many, rows_like

from xent_ops.kernels import cpu, reference, reference_divergences
from xent_ops.kernels.divergences import FIELDS, STATISTICS
from xent_ops.kernels.options import as_record

pytestmark = pytest.mark.skipif(cpu.problem() is not None, reason=f"plain torch serves the CPU here: {cpu.problem()}")

BETAS = (0.5, 0.03, 0.875, 1e-60)
ACTIVATION = {
    "temperature": 1.0,
    "softcap": None,
    "logit_scale": 1.0,
    "teacher_softcap": None,
    "teacher_logit_scale": 1.0,
}


@st.composite
def pairs(draw):
    """(logits, teacher_logits, target, options, generator); the classes behind num_classes are padding."""
    logits, target, _, given, generator = draw(problems.problems())
    width = logits.shape[-1]
    classes = draw(st.sampled_from([None, width, max(1, width - 3)]))
    teacher_width = width if classes is None else classes + draw(st.integers(0, 2))
    # A class that one of them masks makes the divergence infinite where the other's probability is not zero: no
    # probability that is zero or not by how exp treats numbers below 2**-126.
    masked = not logits.isfinite().all() or draw(st.booleans())
    most = (
        4 if masked else 2000
    )  # -inf is -60 with a softcap; far beyond 2000, plain torch's lse of two equal logits is one of them
    logits = logits.clamp(-most, most).where(logits.isfinite(), logits)
    teacher = torch.randn((*logits.shape[:-1], teacher_width), generator=generator) * (1 if masked else 30)
    teacher = teacher.to(draw(st.sampled_from(FLOATS)))
    for one in (teacher, *((logits, teacher) if draw(st.booleans()) else ())):
        if masked and one.numel() and draw(st.booleans()):
            one[..., :: draw(st.integers(3, 9))] = -math.inf
    options = {name: draw(st.sampled_from((default, *VALUES[name]))) for name, default in ACTIVATION.items()}
    options |= {"beta": draw(st.sampled_from(BETAS)), "ignore_index": given["ignore_index"], "num_classes": classes}
    options["fields"] = ",".join(draw(st.lists(st.sampled_from(FIELDS), min_size=1, unique=True)))
    ignored = target.to(torch.int64) == options["ignore_index"]
    inside = target.to(torch.int64).clamp(0, (classes or width) - 1)
    return logits, teacher, torch.where(ignored, options["ignore_index"], inside), options, generator


def check(name, arguments, options, logits, counted=None):
    """As plain torch. ``counted``: the rows whose statistics mean something."""

    def compared(results):
        return results if counted is None else (results[0], results[1][:, counted])

    return problems.check(name, arguments, options, logits, reference_divergences, compared)


def upstream(target, options, dtype, generator):
    """(5, ...); NaN where nothing is to be read."""
    values = [rows_like(target, dtype, generator) for _ in FIELDS]
    read = options["fields"].split(",")
    return torch.stack([v if name in read else v * math.nan for name, v in zip(FIELDS, values, strict=True)])


def plain_statistics(rows, options):
    return reference_divergences.divergences_forward(*rows, **as_record(dict(options)))[1]


@many
@given(data=st.data())
def test_rows(data):
    """Values, gradients, and the gradient over the logits."""
    logits, teacher, target, options, generator = data.draw(pairs())
    rows = logits, teacher, target
    lse = None
    if data.draw(st.booleans()):  # of more classes than these
        lse = plain_statistics(rows, options)[1].to(torch.float32) + torch.rand(target.shape, generator=generator)
        lse = torch.stack([lse, torch.zeros_like(lse)])
    check("divergences_forward", (*rows, lse), options, logits, target != options["ignore_index"])
    saved = *rows, plain_statistics((*rows, lse), options)
    grad = upstream(target, options, data.draw(st.sampled_from(FLOATS)), generator)
    gradient = check("divergences_backward", (grad, *saved), options, logits)
    over = logits.contiguous().clone()
    cpu.kernel("divergences_backward_")(grad, over, *saved[1:], **options)
    torch.testing.assert_close(over, gradient, rtol=0, atol=0, equal_nan=True)


@many
@given(data=st.data())
def test_loss_and_gradient_at_once(data):
    logits, teacher, target, options, generator = data.draw(pairs())
    hard = data.draw(st.booleans())
    options["fields"] = data.draw(st.sampled_from(FIELDS[:3])) + (",log_prob" if hard else "")
    options["hard_weight"] = data.draw(st.sampled_from(VALUES["hard_weight"])) if hard else 0.0
    grad = rows_like(target, data.draw(st.sampled_from(FLOATS)), generator, expanded=data.draw(st.booleans()))
    rows = logits, teacher, target
    loss, gradient = check("divergences_with_grad", (*rows, grad), options, logits)
    over = logits.contiguous().clone()
    again = cpu.kernel("divergences_with_grad_")(over, *rows[1:], grad, **options)
    torch.testing.assert_close((again, over), (loss, gradient), rtol=0, atol=0, equal_nan=True)


@many
@given(data=st.data())
def test_slices(data):
    logits, teacher, target, options, generator = data.draw(pairs())
    columns = options["num_classes"] or logits.shape[-1]
    logits, teacher = logits[..., :columns], teacher[..., :columns]
    start = data.draw(st.sampled_from([0, 3, columns]))
    options["num_classes"] = start + columns + data.draw(st.integers(0, 4))
    counted = target != options["ignore_index"]
    target = torch.where(counted, (target + data.draw(st.integers(0, 5))) % options["num_classes"], target)
    counted = target != options["ignore_index"]
    dtype = reference.accumulator(logits)
    check("divergences_forward", (logits, teacher, target, None, None, start), options, logits, counted)
    of_slice = plain_statistics((logits, teacher, target, None, None, start), options)
    joined = of_slice + torch.rand((STATISTICS, *target.shape), generator=generator).to(dtype)  # of more classes
    joined[4] = joined[4].clamp(max=1.0)
    if options["temperature"] == 1.0 or "log_prob" not in options["fields"]:
        joined[5] = joined[0]  # one lse serves both
    if "mixture" in options["fields"] or "overlap" in options["fields"]:
        check("divergences_forward", (logits, teacher, target, None, joined, start), options, logits, counted)
    grad = upstream(target, options, dtype, generator)
    check("divergences_backward", (grad, logits, teacher, target, joined, start), options, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [64, 5000, 40_000])
def test_forward_and_backward_agree_on_the_classes_below_the_teacher(dtype, classes):
    """Near ties too, where the last bit decides: else the gradient of the overlap would not add up to 0."""
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(20, classes, generator=generator, dtype=dtype).mul(3)
    teacher = logits + 8 * torch.finfo(dtype).eps * torch.randn(20, classes, generator=generator, dtype=dtype)
    rows = logits, teacher, torch.zeros(20, dtype=torch.int64)
    values, statistics = cpu.kernel("divergences_forward")(*rows, fields="overlap")
    gradient = cpu.kernel("divergences_backward")(torch.ones_like(values), *rows, statistics, fields="overlap")
    assert gradient.abs().sum(-1).mean() > 0.1  # classes lie on both sides
    bound = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.sum(-1), torch.zeros_like(values[0]), rtol=0, atol=bound)
    torch.testing.assert_close(values[3], torch.ones_like(values[3]), rtol=0, atol=bound)
