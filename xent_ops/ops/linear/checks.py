"""Checks of a rank's slice of one head or two, ahead of functions that compute before they call an operator.

A slice may be empty. ``names``: the caller's names of weights and biases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.divergences import Divergences
from ...kernels.options import Chunking
from .. import distillation_checks, rules
from ..library import OPERATORS


def head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    accumulate_dtype: torch.dtype | None,
    chunking: Chunking,
    names: tuple[str, str],
) -> None:
    contract = OPERATORS["linear_cross_entropy_backward"].contract
    call = contract.blank(
        input=input,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
        num_classes=1,
        accumulate_dtype=accumulate_dtype,
        **chunking.keywords(),
    )
    contract.check_tensors(call, dict(zip(("linear_weight", "linear_bias"), names, strict=True)))
    rules.chunking(call)


def two_heads(
    student: tuple[Tensor, Tensor, Tensor | None],  # input, weight, bias
    target: Tensor,
    teacher: tuple[Tensor, Tensor, Tensor | None, Tensor | None],  # its input, weight, bias; the student's classes
    spec: Divergences,
    class_start: int,
    names: tuple[str, str],
    teacher_names: tuple[str, str],
) -> None:
    contract = OPERATORS["linear_divergences_chunk"].contract
    fields = ("input", "linear_weight", "linear_bias"), ("teacher_input", "teacher_weight", "teacher_bias", "classes")
    heads: dict[str, Any] = dict(zip(fields[0], student, strict=True)) | dict(zip(fields[1], teacher, strict=True))
    call = contract.blank(target=target, class_start=class_start, num_classes=spec.num_classes, **heads)
    contract.check_tensors(call, dict(zip((*fields[0][1:], *fields[1][1:3]), (*names, *teacher_names), strict=True)))
    distillation_checks.options(spec, student[0], teacher[0])
    widths, classes = (student[1].shape[0], teacher[1].shape[0]), teacher[3]
    widths = widths if classes is None else (widths[0], classes.shape[0])
    distillation_checks.slices(spec, class_start, *widths, (names[0], teacher_names[0]))
