"""Several classes per row, ``ids`` (..., K): x of each, lse and entropy, from logits or from a head by chunks.

The row operators compute the lse and the entropy; their target is the first counted id of the row. Plain torch computes
x of the ids: kernels/reference_ids.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference, reference_ids
from ..kernels.options import DEFAULTS, Chunking, RowOptions
from . import float16
from .backend import IN_MEMORY, Backend
from .chunks import Gradients, as_rows, in_dtype, unpack_statistics
from .products import InPlace, OutOfPlace

_ops = torch.ops.xent


def statistics_of_rows(
    logits: Tensor,
    ids: Tensor,
    with_entropy: bool = False,
    batch_invariant: bool = False,
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x of the ids (..., K), lse (...), entropy (...) or (0,)) of logits (..., V)."""
    target = reference_ids.first_counted(ids, options.ignore_index)
    flags = (False, with_entropy, batch_invariant)
    _, lse, _, entropy, _ = _ops.cross_entropy_forward(logits, target, None, *flags, **options.keywords())
    return reference_ids.gather(logits, ids, 0, None, options), lse, entropy


def gradient(
    grad_ids: Tensor,  # (..., K)
    grad_lse: Tensor | None,  # (...)
    grad_entropy: Tensor | None,
    logits: Tensor,  # (..., columns)
    ids: Tensor,
    at_ids: Tensor,
    lse: Tensor,
    entropy: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    class_start: int = 0,
    num_classes: int | None = None,
    grad_dtype: torch.dtype | None = None,
    writer: InPlace = OutOfPlace(),  # noqa: B008 (it has no state)
    mask_ids: bool = False,  # the logits have the ids masked, and lse is over the other classes
) -> Tensor:
    """(..., columns), written over the logits or to new memory."""
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)
    grad_lse = torch.where(at_ids.isnan().any(-1), float("nan"), grad_lse)  # NaN also for an id that is no class
    target, keywords = reference_ids.first_counted(ids, options.ignore_index), options.keywords()
    slice_args = (None, None, grad_entropy, entropy, None, class_start, num_classes, grad_dtype)
    backward_args = (lse.new_zeros(()), grad_lse, logits, target, lse, *slice_args)
    (grad_logits,) = writer.write("cross_entropy_backward", logits, *backward_args, **keywords)
    if mask_ids:  # this lse does not depend on the ids
        grad_lse, lse = torch.zeros_like(lse), torch.full_like(lse, math.inf)
    column_args = (ids, at_ids, grad_ids, grad_lse, lse, grad_entropy, entropy, class_start, num_classes)
    return writer.write_columns(grad_logits, grad_dtype, *column_args, options=options)


def statistics(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None = None,
    with_entropy: bool = False,
    mask_ids: bool = False,
    *,
    options: RowOptions = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # only the backward uses it
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> tuple[Tensor, ...]:
    """(x of the ids (..., K), lse (...), entropy (...) or (0,)) of a head's logits."""
    flat, chunking, target = as_rows(input), Chunking(**fields), reference_ids.first_counted(ids, options.ignore_index)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, linear_weight))
    products = backend.products(rows, flat, linear_weight, linear_bias, chunking)

    def visit(logits: Tensor, ids: Tensor) -> Sequence[Tensor]:
        if not mask_ids:
            return statistics_of_rows(logits, ids, with_entropy, options=options)
        at_ids = reference_ids.gather(logits, ids, 0, None, options)
        masked = reference_ids.mask(logits, ids, 0, None, options)
        logits = products.scatter(logits, masked.column, masked.value)
        _, lse, entropy = statistics_of_rows(logits, ids, with_entropy, options=options)
        return at_ids, masked.lse(lse, logits.shape[-1], options), entropy

    computed = products.run(visit, rows.pack_classes(ids))
    ignored = options.ignore_index if chunking.skip_ignored else None
    return tuple(unpack_statistics(rows, computed, (0.0, math.inf, 0.0 if with_entropy else None), target, ignored))


def gradients(
    grad_ids: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    at_ids: Tensor,
    lse: Tensor,
    linear_bias: Tensor | None = None,
    entropy: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    mask_ids: bool = False,
    *,
    options: RowOptions = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> Gradients:
    """Compute the logits again. The gradients have the inputs' dtype, or are (0,) if the mask does not want them."""
    flat, chunking, target = as_rows(input), Chunking(**fields), reference_ids.first_counted(ids, options.ignore_index)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, linear_weight))
    grads = [
        rows.pack_rows(grad_ids.to(lse.dtype)),
        *(None if value is None else rows.pack_grads(value) for value in (grad_lse, grad_entropy)),
    ]
    values = [None if value is None else rows.pack_rows(value) for value in (at_ids, lse, entropy)]
    factors, row_grads = float16.split_grads(input.dtype, grads, rows.indices(), linear_weight.shape[0], options)
    products = backend.products(rows, flat, linear_weight, linear_bias, chunking, output_mask, accumulate_dtype)
    gradient_options = {"options": options, "grad_dtype": products.grad_dtype, "writer": products, "mask_ids": mask_ids}

    def visit(
        logits: Tensor, grad_ids: Tensor, grad_lse: Tensor | None, grad_entropy: Tensor | None, *values: Any
    ) -> list[Tensor]:
        if mask_ids:
            masked = reference_ids.mask(logits, values[0], 0, None, options)
            logits = products.scatter(logits, masked.column, masked.value)
        return [gradient(grad_ids, grad_lse, grad_entropy, logits, *values, **gradient_options)]

    if any(output_mask):
        shares = None if factors is None else factors.shares
        products.run(visit, *row_grads, rows.pack_classes(ids), *values, gradient=True, shares=shares)
    return in_dtype(products.gradients(input.shape, factors), input.dtype)


def with_grad(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    grad_log_probs: Tensor,
    grad_lse_square: Tensor | None = None,
    linear_bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    shares: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> tuple[Tensor, ...]:
    """(x of the ids, lse, the gradients in the dtypes in which they were added up).

    The gradients are of the sum of grad_log_probs * log_probs and of grad_lse_square * lse^2, over counted rows.
    """
    flat, chunking, keywords = as_rows(input), Chunking(**fields), options.keywords()
    target = reference_ids.first_counted(ids, options.ignore_index)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, linear_weight))
    grad_ids = rows.pack_rows(torch.where(reference.is_counted(ids, options.ignore_index), grad_log_probs, 0.0))
    grad_lse_squares = None if grad_lse_square is None else rows.pack(grad_lse_square)
    products = backend.products(rows, flat, linear_weight, linear_bias, chunking, output_mask, accumulate_dtype)
    result_args = (None, False, False, products.grad_dtype)

    def visit(logits: Tensor, ids: Tensor, target: Tensor, grad_ids: Tensor, grad_lse_squares: Any) -> Sequence[Tensor]:
        at_ids = reference_ids.gather(logits, ids, 0, None, options)
        # The kernel takes the first id as its target. The columns of all ids are written again afterwards.
        grad_target = torch.where(at_ids.isnan().any(-1), float("nan"), -grad_ids.sum(-1))
        row_args = (logits, target, grad_target, grad_lse_squares, *result_args)
        _, lse, *_, grad_logits = products.write("cross_entropy_with_grad", logits, *row_args, **keywords)
        grad_lse = reference.grad_lse_of_square(grad_lse_squares, lse, target, options.ignore_index)
        grad_target = grad_target if grad_lse is None else grad_target + grad_lse
        column_args = (ids, at_ids, grad_ids, grad_target, lse)
        return at_ids, lse, products.write_columns(grad_logits, products.grad_dtype, *column_args, options=options)

    indices = (rows.pack_classes(ids), rows.indices())
    shares = None if shares is None else rows.pack(shares)
    computed = products.run(visit, *indices, grad_ids, grad_lse_squares, gradient=True, shares=shares)
    values = unpack_statistics(rows, computed, (0.0, math.inf), target, None)
    return *values, *products.gradients(input.shape)
