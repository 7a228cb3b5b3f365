"""What no distillation can take: see checks.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..kernels.distillation import Distillation
from ..kernels.reference import columns_of
from ..kernels.reference_distillation import STATISTICS
from . import checks


def options(how: Distillation, student: Tensor, teacher: Tensor) -> None:
    """``student``, ``teacher``: tensors of the dtypes of their logits."""
    if not 0.0 <= how.beta <= 1.0:
        raise ValueError(f"beta must be between 0.0 and 1.0, got {how.beta}")
    if not (how.temperature > 0.0 and math.isfinite(how.temperature)):
        raise ValueError(f"temperature must be a finite number above 0, got {how.temperature}")
    if not math.isfinite(how.hard_weight):
        raise ValueError(f"hard_weight must be finite, got {how.hard_weight}")
    if how.options.label_smoothing != 0.0:
        raise ValueError(f"label_smoothing must be 0.0 in a distillation, got {how.options.label_smoothing}")
    for name, tensor, given in (("", student, how.student()), ("teacher_", teacher, how.teacher())):
        try:
            checks.row_options(None, tensor, given)
        except ValueError as error:
            divided = "" if how.temperature == 1.0 else f" (divided by temperature={how.temperature})"
            raise ValueError(f"{name}{error}{divided}") from None


def classes(how: Distillation, width: int, teacher_width: int, names: tuple[str, str]) -> None:
    """``names``: of what has the student's and the teacher's classes."""
    number = how.num_classes
    if number is None:
        if type(width) is type(teacher_width) is int and width == teacher_width:
            return
        checks.check_value(
            width == teacher_width,
            lambda: (
                f"{names[0]} has {width} classes but {names[1]} {teacher_width}; where one is padded behind the "
                "classes that both have, say how many those are: num_classes="
            ),
        )
        return
    if type(number) is type(width) is type(teacher_width) is int and 1 <= number <= min(width, teacher_width):
        return
    for size, name in ((width, names[0]), (teacher_width, names[1])):
        checks.check_value(
            number <= size, lambda name=name, size=size: f"num_classes={number} is more than the {size} of {name}"
        )
    checks.check_value(number >= 1, lambda: f"num_classes must be at least 1, got {number}")


def slices(how: Distillation, class_start: int | None, width: int, teacher_width: int, names: tuple[str, str]) -> None:
    """Without a class_start all classes, as ``classes``; else both must be split at the same classes."""
    if class_start is None:
        classes(how, width, teacher_width, names)
        return
    number = how.num_classes
    if number is None:
        raise ValueError(f"class_start={class_start} is of a slice: num_classes must say how many classes all have")
    for size in (width, teacher_width):
        checks.shard_range(size, class_start, number)
    columns, others = (columns_of(size, class_start, number) for size in (width, teacher_width))
    checks.check_value(
        columns == others,
        lambda: (
            f"{names[0]} has {columns} of the {number} classes from class_start={class_start} on but {names[1]} "
            f"{others}; the student's head and the teacher's must be split at the same classes"
        ),
    )


def joined(tensor: Tensor | None, class_start: int | None, how: Distillation, target: Tensor, like: Tensor) -> None:
    if tensor is None:
        return
    if class_start is None or not 0.0 < how.beta < 1.0:
        raise ValueError("joined statistics are for a slice of the classes, class_start=, at a beta between 0 and 1")
    statistics_of_rows("joined", tensor, target, like)


def statistics_of_rows(name: str, tensor: Tensor, target: Tensor, logits: Tensor) -> None:
    checks.dtype(name, tensor, checks.FLOATS)
    expected = torch.Size((STATISTICS, *target.shape))
    checks.same_shape(name, tensor.shape, expected, "those that distillation_forward makes of each row")
    checks.same_device(name, tensor, logits)


def forward(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    of_all: Tensor | None = None,
    class_start: int | None = None,
    **given: Any,
) -> None:
    how = Distillation(**given)
    checks.floating_logits(logits, may_be_empty=class_start is not None)
    checks.dtype("teacher_logits", teacher_logits, checks.FLOATS)
    rows = logits.shape[:-1]
    if teacher_logits.dim() != logits.dim():
        checks.same_shape("teacher_logits", teacher_logits.shape, logits.shape, "as the logits")
    checks.same_shape(
        "teacher_logits", teacher_logits.shape[:-1], rows, "the rows of the logits, which are before the classes"
    )
    checks.same_device("teacher_logits", teacher_logits, logits)
    checks.dtype("target", target, checks.INDICES)
    checks.same_shape("target", target.shape, rows, "one class index for each row of the logits")
    checks.same_device("target", target, logits)
    options(how, logits, teacher_logits)
    slices(how, class_start, logits.shape[-1], teacher_logits.shape[-1], ("logits", "teacher_logits"))
    joined(of_all, class_start, how, target, logits)


def values(logits: Tensor, teacher_logits: Tensor, target: Tensor, *_: Any, **given: Any) -> None:
    """Of the hard loss; else a target says only what is ignored."""
    how = Distillation(**given)
    if how.hard_weight != 0.0:
        checks.target_values(target, how.columns(logits), how.options.ignore_index)


def with_grad(logits: Tensor, teacher_logits: Tensor, target: Tensor, grad_scale: Tensor, **given: Any) -> None:
    forward(logits, teacher_logits, target, **given)
    checks.scalar_or_rows_of("logits", logits, grad_scale=grad_scale)


def backward(
    grad_loss: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    class_start: int | None = None,
    **given: Any,
) -> None:
    forward(logits, teacher_logits, target, None, class_start, **given)
    checks.scalar_or_rows_of("logits", logits, grad_loss=grad_loss)
    statistics_of_rows("statistics", statistics, target, logits)


def backward_values(grad_loss: Tensor, *rest: Any, **given: Any) -> None:
    values(*rest, **given)


def teacher_is_constant(name: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        teacher_needs_grad(name)


def teacher_needs_grad(name: str) -> None:
    raise RuntimeError(
        f"{name} requires grad, and distillation has no derivative for its teacher: compute it below torch.no_grad(), "
        "or detach it"
    )
