"""Distillation by chunks of rows: the products of a student's head and of its teacher's, the rows by our operators.

As chunks.py, with a second set of logits beside the student's: two chunks exist at a time. The teacher's products are
skipped where the student's are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import reductions
from ..kernels.distillation import Distillation
from ..kernels.options import Chunking, LossOptions, Options
from ..kernels.reference import accumulator
from . import float16
from .chunks import Gradients, as_rows, divided_by
from .packing import ComputedRows, counted_rows
from .products import Products, counting_kernels

_ops = torch.ops.xent


class Head(NamedTuple):
    input: Tensor  # (N, H)
    weight: Tensor
    bias: Tensor | None


def _rows_to_compute(target: Tensor, heads: Sequence[Head], how: Distillation, chunking: Chunking) -> ComputedRows:
    """Those that the products of both heads can leave out together."""
    if not chunking.skip_ignored:
        return ComputedRows(target)
    kernels = [counting_kernels(head.input, head.weight) for head in heads]
    return counted_rows(target, how.options.ignore_index, None if None in kernels else kernels[0])


class _Both:
    """The products of both heads, whose chunks are of the same rows, and what the rows' operators are given."""

    def __init__(
        self, student: Head, target: Tensor, teacher: Head, how: Distillation, chunking: Chunking, *more: Any
    ) -> None:
        student, teacher = (head._replace(input=as_rows(head.input)) for head in (student, teacher))
        self.rows = _rows_to_compute(target, (student, teacher), how, chunking)
        self.student = Products(self.rows, *student, chunking, *more)
        self.teacher = Products(self.rows, *teacher, Chunking(self.student.size))
        self.indices, self.keywords = self.rows.indices(), how.keywords()

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(which of the rows, the student's logits, which may be overwritten, the teacher's)."""
        for (chunk, logits), (_, teacher_logits) in zip(self.student.chunks(), self.teacher.chunks(), strict=True):
            yield chunk, logits, teacher_logits


def losses(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    accumulate_dtype: torch.dtype | None = None,  # for the backward
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """(losses of the rows, (...), statistics, (4, ...)), as of distillation_forward."""
    how = Distillation(**given)
    student, teacher = Head(input, linear_weight, linear_bias), Head(teacher_input, teacher_weight, teacher_bias)
    both = _Both(student, target, teacher, how, Chunking(chunk_rows, skip_ignored))
    made = [
        _ops.distillation_forward(logits, teacher_logits, both.indices[chunk], **both.keywords)
        for chunk, logits, teacher_logits in both.chunks()
    ]
    row_loss, statistics = (torch.cat(values, -1) for values in zip(*made, strict=True))
    of_rows = torch.stack([both.rows.give(values, 0.0) for values in statistics.unbind()])
    return both.rows.give(row_loss, 0.0).view(target.shape), of_rows.view(len(of_rows), *target.shape)


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
    """Makes the logits of both again. Gradients in the student's dtype; (0,) where the mask does not want one."""
    how, dtype = Distillation(**given), accumulator(input)
    student, teacher = Head(input, linear_weight, linear_bias), Head(teacher_input, teacher_weight, teacher_bias)
    both = _Both(student, target, teacher, how, Chunking(chunk_rows, skip_ignored), output_mask, accumulate_dtype)
    upstream, factor = both.rows.take(grad_loss.to(dtype).expand(target.shape)), None
    if input.dtype == torch.float16:
        factor = float16.largest(both.indices, None, None, linear_weight.shape[0], how.options, upstream)
        upstream = upstream / factor
    of_rows = torch.stack([both.rows.take(values) for values in statistics.unbind()])
    for chunk, logits, teacher_logits in both.chunks():
        given_rows = (teacher_logits, both.indices[chunk], of_rows[:, chunk])
        _ops.distillation_backward_(upstream[chunk], logits, *given_rows, **both.keywords)
        both.student.add(chunk, logits)
    sums = (both.student.input, both.student.weight, both.student.bias)
    if factor is not None:
        for gradient in sums:
            _ops.scale_grad_(gradient, factor)
    of_input, of_weight, of_bias = (gradient.to(input.dtype) for gradient in sums)
    return of_input.view(input.shape if output_mask[0] else 0), of_weight, of_bias


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
    """(value, divided_by, gradients), with the gradients as those of chunks.with_grad."""
    how, dtype = Distillation(**given), accumulator(input)
    loss = LossOptions(Options(how.options.ignore_index), reduction=reduction)
    divisors = divided_by(target, None, divisor, linear_weight.shape[0], dtype, loss, token_weight)
    inverse = float16.split_divisors(input.dtype, divisors, target, token_weight, loss=loss)[0][0].reciprocal()
    student, teacher = Head(input, linear_weight, linear_bias), Head(teacher_input, teacher_weight, teacher_bias)
    chunking, made = Chunking(chunk_rows, skip_ignored), []
    both = _Both(student, target, teacher, how, chunking, output_mask, accumulate_dtype)
    factors = None if token_weight is None else inverse * both.rows.take(token_weight.to(dtype))
    for chunk, logits, teacher_logits in both.chunks():
        factor = inverse if factors is None else factors[chunk]
        made.append(_ops.distillation_with_grad_(logits, teacher_logits, both.indices[chunk], factor, **both.keywords))
        both.student.add(chunk, logits)
    row_loss = both.rows.give(torch.cat(made), 0.0).view(target.shape)
    mean = loss._replace(reduction="mean")
    products = both.student
    return (
        reductions.reduce_rows(row_loss, row_loss, target, divisors, mean, token_weight).value,
        divisors,
        products.input.view(input.shape if output_mask[0] else 0),
        products.weight,
        products.bias,
    )
