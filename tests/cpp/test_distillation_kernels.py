"""Distillation of rows in C++ against plain torch."""

import math

import problems
import pytest
import torch
from helpers.option_values import drawn
from hypothesis import given
from hypothesis import strategies as st
from problems import FLOATS, many, rows_like

from xent_ops.kernels import cpu, reference, reference_distillation
from xent_ops.kernels.options import as_record

pytestmark = pytest.mark.skipif(cpu.problem() is not None, reason=f"plain torch serves the CPU here: {cpu.problem()}")

BETAS = (0.0, 1.0, 0.5, 0.03, 1e-60)


@st.composite
def distilled(draw):
    """(logits, teacher_logits, target, options, generator); the classes behind num_classes are padding."""
    logits, target, _, given, generator = draw(problems.problems())
    width = logits.shape[-1]
    classes = draw(st.sampled_from([None, width, max(1, width - 3)]))
    teacher_width = width if classes is None else classes + draw(st.integers(0, 2))
    # A class that one of them masks makes the divergence infinite where the other's probability is not zero: no
    # probability that is zero or not by how exp treats numbers below 2**-126.
    masked = not logits.isfinite().all() or draw(st.booleans())
    most = 10 if masked else 2000  # far beyond, plain torch's lse of two equal logits is one of them
    logits = logits.clamp(-most, most).where(logits.isfinite(), logits)
    teacher = torch.randn((*logits.shape[:-1], teacher_width), generator=generator) * (1 if masked else 30)
    teacher = teacher.to(draw(st.sampled_from(FLOATS)))
    for one in (teacher, *((logits, teacher) if draw(st.booleans()) else ())):
        if masked and one.numel() and draw(st.booleans()):
            one[..., :: draw(st.integers(3, 9))] = -math.inf
    options = {name: draw(st.sampled_from(values)) for name, values in drawn("distillation_forward").items()}
    options |= {"beta": draw(st.sampled_from(BETAS)), "ignore_index": given["ignore_index"], "num_classes": classes}
    ignored = target.to(torch.int64) == options["ignore_index"]
    inside = target.to(torch.int64).clamp(0, (classes or width) - 1)
    return logits, teacher, torch.where(ignored, options["ignore_index"], inside), options, generator


def check(name, arguments, options, logits, counted=None):
    """As plain torch. ``counted``: the rows whose statistics mean something."""

    def compared(results):
        return results if counted is None else (results[0], results[1][:, counted])

    return problems.check(name, arguments, options, logits, reference_distillation, compared)


@many
@given(data=st.data())
def test_rows(data):
    """Values, gradients, both in one, and over the logits."""
    logits, teacher, target, options, generator = data.draw(distilled())
    counted = target != options["ignore_index"]
    rows = logits, teacher, target
    check("distillation_forward", rows, options, logits, counted)
    statistics = reference_distillation.distillation_forward(*rows, **as_record(dict(options)))[1]
    grad = rows_like(target, data.draw(st.sampled_from(FLOATS)), generator, expanded=data.draw(st.booleans()))
    saved = *rows, statistics
    gradient = check("distillation_backward", (grad, *saved), options, logits)
    over = logits.contiguous().clone()
    cpu.kernel("distillation_backward_")(grad, over, *saved[1:], **options)
    torch.testing.assert_close(over, gradient, rtol=0, atol=0, equal_nan=True)

    loss, gradient = check("distillation_with_grad", (*rows, grad), options, logits)
    over = logits.contiguous().clone()
    again = cpu.kernel("distillation_with_grad_")(over, *rows[1:], grad, **options)
    torch.testing.assert_close((again, over), (loss, gradient), rtol=0, atol=0, equal_nan=True)


@many
@given(data=st.data())
def test_slices(data):
    logits, teacher, target, options, generator = data.draw(distilled())
    columns = options["num_classes"] or logits.shape[-1]
    logits, teacher = logits[..., :columns], teacher[..., :columns]
    start = data.draw(st.sampled_from([0, 3, columns]))
    options["num_classes"] = start + columns + data.draw(st.integers(0, 4))
    counted = target != options["ignore_index"]
    target = torch.where(counted, (target + data.draw(st.integers(0, 5))) % options["num_classes"], target)
    counted = target != options["ignore_index"]
    check("distillation_forward", (logits, teacher, target, None, start), options, logits, counted)
    dtype = reference.accumulator(logits)
    plain = reference_distillation.distillation_forward
    of_slice = plain(logits, teacher, target, None, start, **as_record(dict(options)))[1]
    joined = of_slice + torch.rand((4, *target.shape), generator=generator).to(dtype)  # of more classes
    if options["temperature"] == 1.0 or options["hard_weight"] == 0.0:
        joined[3] = joined[0]  # one lse serves both
    if 0.0 < options["beta"] < 1.0:
        check("distillation_forward", (logits, teacher, target, joined, start), options, logits, counted)
    grad = rows_like(target, dtype, generator)
    check("distillation_backward", (grad, logits, teacher, target, joined, start), options, logits)
