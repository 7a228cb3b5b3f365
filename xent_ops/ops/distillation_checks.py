"""Checks for all distillation operators: see checks.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.divergences import Divergences
from ..kernels.reference import columns_of
from ..kernels.sizes import statically_equal
from . import checks

CLASSES_ALONE = "classes= and num_classes= exclude each other: with classes every row of the student's head is a class"


def hard_weight(value: float) -> None:
    if not abs(value) < math.inf:  # math.isfinite takes no symbol of Dynamo
        raise ValueError(f"hard_weight must be finite, got {value}")


def class_values(classes: Tensor | None, number: int, hint: str = "") -> None:
    """Raise for classes that the teacher does not have, and for equal ones. It reads them, so it is for CPU tensors."""
    if classes is None:
        return
    classes = classes.to(torch.int64)  # torch compares a number of 8 bits with 300 as with 44
    bad = classes[(classes < 0) | (classes >= number)]
    if len(bad) > 0:
        valid = f"valid are 0 to {number - 1}{hint}"
        raise IndexError(f"classes has {int(bad[0])}, which the teacher does not have: {valid}")
    sorted_classes = classes.sort().values
    equal = sorted_classes[1:][sorted_classes[1:] == sorted_classes[:-1]]
    if len(equal) > 0:
        raise ValueError(
            f"classes has {int(equal[0])} more than once: expected the ids of different classes. Of offsets (d2t) they "
            "are torch.arange(len(d2t), device=d2t.device) + d2t, of a mask (t2d) t2d.nonzero().squeeze(-1)"
        )


def mask_hint(classes: Tensor, number: int) -> str:
    """For classes of a wrong shape, where the teacher has this number."""
    if not statically_equal(classes.shape, (number,)):
        return ""
    return ": of a mask of the teacher's classes (t2d) pass t2d.nonzero().squeeze(-1)"


def are_ids(classes: Tensor) -> None:
    if classes.dtype == torch.bool:
        raise TypeError("classes has dtype torch.bool, a mask: expected ids, which are classes.nonzero().squeeze(-1)")
    checks.dtype("classes", classes, checks.INDICES)


def options(spec: Divergences, student: Tensor, teacher: Tensor) -> None:
    """``student``, ``teacher``: tensors with the dtypes of their logits."""
    if not 0.0 <= spec.beta <= 1.0:
        raise ValueError(f"beta must be between 0.0 and 1.0, got {spec.beta}")
    if not 0.0 < spec.temperature < math.inf:  # math.isfinite takes no symbol of Dynamo
        raise ValueError(f"temperature must be a finite number above 0, got {spec.temperature}")
    if spec.options.label_smoothing != 0.0:
        raise ValueError(f"label_smoothing must be 0.0 in a distillation, got {spec.options.label_smoothing}")
    for name, tensor, head_options in (("", student, spec.student()), ("teacher_", teacher, spec.teacher())):
        try:
            checks.option_values(head_options, tensor.dtype)
        except ValueError as error:
            divided = "" if spec.temperature == 1.0 else f" (divided by temperature={spec.temperature})"
            raise ValueError(f"{name}{error}{divided}") from None


def classes(spec: Divergences, width: int, teacher_width: int, names: tuple[str, str]) -> None:
    """``names``: the arguments that have the student's and the teacher's classes."""
    number = spec.num_classes
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


def slices(spec: Divergences, class_start: int | None, width: int, teacher_width: int, names: tuple[str, str]) -> None:
    """Without a class_start: all classes, as in ``classes``. With one, both heads must be split at the same classes."""
    if class_start is None:
        classes(spec, width, teacher_width, names)
        return
    number = spec.num_classes
    if number is None:
        raise ValueError(
            f"class_start={class_start} is for a slice of the classes: pass num_classes too, the number of all classes"
        )
    for size in (width, teacher_width):
        checks.shard_range(size, class_start, number)
    columns, teacher_columns = (columns_of(size, class_start, number) for size in (width, teacher_width))
    checks.check_value(
        columns == teacher_columns,
        lambda: (
            f"{names[0]} has {columns} of the {number} classes from class_start={class_start} on but {names[1]} "
            f"{teacher_columns}; the student's head and the teacher's must be split at the same classes"
        ),
    )
