"""Operators of one chunk of rows of a rank's slices of two heads, between which the caller's gathers stand.

As chunk.py, whose last two operators serve here too. The loop is head/loop.py's, its steps are of_ranks in
distributed/distillation.py::

    linear_distillation_chunk         a chunk's logits of both heads, and the statistics that a rank hands over
    (distillation_forward             the slice's part of the sums with the mixture, at a beta between 0 and 1)
    linear_distillation_chunk_grad_   from the statistics of all ranks: the gradient, written over the student's logits,
                                      and this rank's part of the input's gradient
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...head import distillation_shard
from ...head.sizes import padded_classes
from ...kernels.distillation import Distillation
from ...kernels.reference import accumulator, columns_of
from .. import checks as row_checks
from .. import distillation_checks
from ..library import Outputs, operator
from . import checks
from .distillation import check_heads


def _check_chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    class_start: int,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    after: Tensor | None = None,
    **given: Any,
) -> None:
    checks.two_dimensions(input)
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    check_heads(student, target, teacher, Distillation(**given), class_start)


def _chunk_outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    class_start: int,
    *_: Any,
    **given: Any,
) -> Outputs:
    how, rows = Distillation(**given), target.shape[0]
    columns = columns_of(linear_weight.shape[0], class_start, how.num_classes)
    return (
        ((1, distillation_shard.width(rows, how)), accumulator(input)),
        ((rows, padded_classes(columns, input.dtype)), input.dtype),
        ((rows, padded_classes(columns, teacher_input.dtype)), teacher_input.dtype),
    )


def _check_grad(
    logits: Tensor,
    grad_loss: Tensor,
    teacher_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    statistics: Tensor,
    class_start: int,
    with_grad_input: bool = True,
    after: Tensor | None = None,
    **given: Any,
) -> None:
    how, classes = Distillation(**given), linear_weight.shape[0]
    distillation_checks.slices(how, class_start, classes, classes, ("linear_weight",) * 2)
    columns = columns_of(classes, class_start, how.num_classes)
    for name, tensor in (("logits", logits), ("teacher_logits", teacher_logits)):
        expected = torch.Size((target.shape[0], padded_classes(columns, tensor.dtype)))
        row_checks.same_shape(name, tensor.shape, expected, "as linear_distillation_chunk makes them")
    of_classes = (logits[:, :columns], teacher_logits[:, :columns])
    distillation_checks.backward(grad_loss, *of_classes, target, statistics, class_start, **given)


def _grad_outputs(
    logits: Tensor,
    _grad_loss: Tensor,
    _teacher_logits: Tensor,
    linear_weight: Tensor,
    _target: Tensor,
    _statistics: Tensor,
    _class_start: int,
    with_grad_input: bool = True,
    _after: Tensor | None = None,
) -> Outputs:
    shape = (logits.shape[0], linear_weight.shape[1]) if with_grad_input else (0,)
    return (shape, linear_weight.dtype), ((0,), linear_weight.dtype)


operator(
    "linear_distillation_chunk",
    check=_check_chunk,
    outputs=_chunk_outputs,
    reference=distillation_shard.chunk,
    composed=True,
    sized_by_options=True,
)
operator(
    "linear_distillation_chunk_grad_",
    check=_check_grad,
    outputs=_grad_outputs,
    reference=distillation_shard.chunk_grad_,
    composed=True,
    overwrites="logits",
)
