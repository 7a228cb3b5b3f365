"""Distillation: the operators of head/distillation.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import reductions, reference, reference_distillation
from ...kernels.distillation import Distillation
from ...kernels.options import Chunking, LossOptions, Options
from .. import chunks, float16
from ..chunks import Gradients, as_rows
from .loop import Loop, logits_of, times


def losses(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    def of_rows(logits: Tensor, target: Tensor, teacher: Tensor) -> Sequence[Tensor]:
        teacher_logits = logits_of(teacher, teacher_weight, teacher_bias)
        loss, statistics = reference_distillation.distillation_forward(logits, teacher_logits, target, **given)
        return loss, *statistics.unbind()

    loop = Loop(as_rows(input), linear_weight, linear_bias, Chunking(chunk_rows, skip_ignored))
    loss, *statistics = loop(of_rows, target.reshape(-1), as_rows(teacher_input))
    if skip_ignored:
        ignored = ~reference.is_counted(target, Distillation(**given).options.ignore_index).reshape(-1)
        statistics = [values.masked_fill(ignored, 0.0) for values in statistics]
    return loss.view(target.shape), torch.stack(statistics).view(len(statistics), *target.shape)


def gradients(
    grad_loss: Tensor,
    statistics: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    **given: Any,
) -> Gradients:
    indices, how = target.reshape(-1), Distillation(**given)
    upstream, factor = grad_loss.to(reference.accumulator(input)).expand(target.shape).reshape(-1), None
    if input.dtype == torch.float16:
        factor = float16.largest(indices, None, None, linear_weight.shape[0], how.options, upstream)
        upstream = upstream / factor

    def of_rows(
        logits: Tensor, target: Tensor, teacher: Tensor, upstream: Tensor, statistics: Tensor
    ) -> Sequence[Tensor]:
        rows = (logits_of(teacher, teacher_weight, teacher_bias), target, statistics.t())
        return (reference_distillation.distillation_backward(upstream, logits, *rows, **given),)

    chunking = Chunking(chunk_rows, skip_ignored)
    loop = Loop(as_rows(input), linear_weight, linear_bias, chunking, output_mask, accumulate_dtype)
    if any(output_mask):
        loop(of_rows, indices, as_rows(teacher_input), upstream, statistics.reshape(len(statistics), -1).t())
    return times(loop.gradients(input.shape), factor, input.dtype)


def with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divisor: Tensor | None = None,
    token_weight: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    *,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    **given: Any,
) -> tuple[Tensor, ...]:
    dtype, options = reference.accumulator(input), Distillation(**given).options
    loss = LossOptions(Options(options.ignore_index), reduction=reduction)
    divisors = chunks.divided_by(target, None, divisor, linear_weight.shape[0], dtype, loss, token_weight)
    inverse = float16.split_divisors(input.dtype, divisors, target, token_weight, loss=loss)[0][0].reciprocal()
    indices = target.reshape(-1)
    factors = inverse.expand(indices.shape) if token_weight is None else inverse * token_weight.to(dtype).reshape(-1)

    def of_rows(logits: Tensor, target: Tensor, teacher: Tensor, factor: Tensor) -> Sequence[Tensor]:
        teacher_logits = logits_of(teacher, teacher_weight, teacher_bias)
        return reference_distillation.distillation_with_grad(logits, teacher_logits, target, factor, **given)

    how = Chunking(chunk_rows, skip_ignored)
    loop = Loop(as_rows(input), linear_weight, linear_bias, how, output_mask, accumulate_dtype)
    row_loss = loop(of_rows, indices, as_rows(teacher_input), factors)[0].view(target.shape)
    mean = loss._replace(reduction="mean")
    value = reductions.reduce_rows(row_loss, row_loss, target, divisors, mean, token_weight).value
    return value, divisors, *loop.gradients(input.shape)
