"""Distillation from hidden states, by chunks of rows: products with both heads, and row operators on their logits.

It works like cross_entropy.py, with two chunks of logits at a time: the student's and the teacher's. The teacher's
products are skipped for the rows that the student's products skip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.distillation import Distillation
from ..kernels.options import Chunking, LossOptions, RowOptions
from ..kernels.reference import accumulator
from . import float16
from .backend import IN_MEMORY, Backend
from .chunks import Gradients, as_rows, divisors_and_factors, in_dtype, unpack_statistics
from .packing import ComputedRows

_ops = torch.ops.xent


Head = tuple[Tensor, Tensor, Tensor | None]  # input, weight, bias
_SKIPPED = (0.0,) * 5


def _products(
    student: Head,
    target: Tensor,
    teacher: Head,
    spec: Distillation,
    chunking: Chunking,
    backend: Backend,
    *gradient_args: Any,
) -> tuple[ComputedRows, Any]:
    """The rows that both heads multiply, and the student's products, whose ``other_heads`` has the teacher's."""
    flat, flat_teacher = as_rows(student[0]), as_rows(teacher[0])
    heads = (flat, student[1]), (flat_teacher, teacher[1])
    rows = backend.rows(target, spec.options.ignore_index, chunking, *heads)
    products = backend.products(rows, flat, *student[1:], chunking, *gradient_args)
    products.other_heads = (backend.products(rows, flat_teacher, *teacher[1:], Chunking(products.size)),)
    return rows, products


def statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    accumulate_dtype: torch.dtype | None = None,  # only the backward uses it
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    """(losses of the rows, (...), statistics, (4, ...)), as distillation_forward returns them."""
    spec, chunking = Distillation(**fields), Chunking(chunk_rows, skip_ignored)
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    rows, products = _products(student, target, teacher, spec, chunking, backend)
    ignored = spec.options.ignore_index if skip_ignored else None

    def visit(logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        loss, statistics = _ops.distillation_forward(logits, teacher_logits, target, **spec.keywords())
        return loss, *statistics.unbind()

    row_loss, *statistics = unpack_statistics(rows, products.run(visit, rows.indices()), _SKIPPED, target, ignored)
    return row_loss, torch.stack(statistics)


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
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> Gradients:
    """Compute both logits again. Gradients have the student's dtype, or are (0,) if the mask does not want them."""
    spec, dtype, chunking = Distillation(**fields), accumulator(input), Chunking(chunk_rows, skip_ignored)
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    rows, products = _products(student, target, teacher, spec, chunking, backend, output_mask, accumulate_dtype)
    indices, grad_rows = rows.indices(), rows.pack(grad_loss.to(dtype).expand(target.shape))
    factors, (upstream,) = float16.split_grads(input.dtype, [grad_rows], indices, linear_weight.shape[0], spec.options)

    def visit(
        logits: Tensor, teacher_logits: Tensor, target: Tensor, grad_loss: Tensor, *statistics: Tensor
    ) -> Sequence[Tensor]:
        row_args = (teacher_logits, target, torch.stack(statistics))
        return products.write("distillation_backward", logits, grad_loss, logits, *row_args, **spec.keywords())

    if any(output_mask):
        values = [rows.pack(value) for value in statistics.unbind()]
        shares = None if factors is None else factors.shares
        products.run(visit, indices, upstream, *values, gradient=True, shares=shares)
    return in_dtype(products.gradients(input.shape, factors), input.dtype)


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
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> tuple[Tensor, ...]:
    """(value, divisors, gradients). The gradients are like those of cross_entropy.with_grad."""
    spec, chunking = Distillation(**fields), Chunking(chunk_rows, skip_ignored)
    loss = LossOptions(RowOptions(spec.options.ignore_index), reduction=reduction)
    divisors, (scale, _), shares = divisors_and_factors(input, target, None, token_weight, divisor, loss)
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    rows, products = _products(student, target, teacher, spec, chunking, backend, output_mask, accumulate_dtype)
    factors = None if token_weight is None and shares is None else rows.pack(scale)
    shares = None if shares is None else rows.pack(shares)

    def visit(logits: Tensor, teacher_logits: Tensor, target: Tensor, factor: Tensor | None) -> Sequence[Tensor]:
        row_args = (teacher_logits, target, scale if factor is None else factor)
        return products.write("distillation_with_grad", logits, logits, *row_args, **spec.keywords())

    computed = products.run(visit, rows.indices(), factors, gradient=True, shares=shares)
    (row_loss,) = unpack_statistics(rows, computed, (0.0,), target, None)
    summary_args = (row_loss, row_loss, target, None, token_weight, divisors)
    value, *_ = _ops.row_summary(*summary_args, **loss._replace(reduction="mean").reduction_keywords())
    return value, divisors, *products.gradients(input.shape)
