"""Several classes per row, ``ids`` (..., K): x of each, lse and entropy, from logits or from a head by chunks.

The row operators compute the lse and the entropy; their target is one of the row's ids (``row_targets``).
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
from .chunks import HeadGradients, as_rows, classes_of, in_dtype, no_gradients, unpack_statistics
from .products import InPlace, OutOfPlace

_ops = torch.ops.xent


def token_logits(
    logits: Tensor,
    ids: Tensor,
    with_entropy: bool = False,
    batch_invariant: bool = False,
    mask_ids: bool = False,
    *,
    options: RowOptions = DEFAULTS,
    writer: InPlace = OutOfPlace(),  # noqa: B008 (it has no state)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x of the ids (..., K), lse (...), entropy (...) or (0,), lse_low (...)) of logits (..., V)."""
    columns, keywords = logits.shape[-1], options.keywords()
    if mask_ids:
        at_ids, logits = writer.mask_columns(logits, columns, ids, (0, None), options)
    else:
        at_ids = _ops.ids_forward(logits, ids, **keywords)
    target = _ops.row_targets(ids, ignore_index=options.ignore_index)
    flags = (False, with_entropy, batch_invariant)
    _, lse, _, entropy, low = _ops.cross_entropy_forward(logits, target, None, *flags, **keywords)
    lse = reference_ids.lse_of_others(lse, ids, columns, options=options) if mask_ids else lse
    return at_ids, lse, entropy, low


def token_logits_backward(
    grad_ids: Tensor,  # (..., K)
    grad_lse: Tensor | None,  # (...)
    grad_entropy: Tensor | None,
    logits: Tensor,  # (..., columns)
    ids: Tensor,
    at_ids: Tensor,
    lse: Tensor,
    entropy: Tensor | None = None,
    lse_low: Tensor | None = None,
    mask_ids: bool = False,  # lse is over the classes that the ids do not name
    *,
    options: RowOptions = DEFAULTS,
    class_start: int = 0,
    num_classes: int | None = None,
    grad_dtype: torch.dtype | None = None,
    writer: InPlace = OutOfPlace(),  # noqa: B008 (it has no state)
    target: Tensor | None = None,  # (...), the ``row_targets`` of a chunk whose logits have been masked
) -> Tensor:
    """(..., columns), written over the logits or to new memory. With ``target``, ignored rows get zeros."""
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)
    row_grads: tuple[Tensor, Tensor | None] = grad_lse, None  # as a loss's: the target's column is written again below
    if target is None:
        target, row_grads = _ops.row_targets(ids, ignore_index=options.ignore_index), (lse.new_zeros(()), grad_lse)
        if mask_ids:
            _, logits = writer.mask_columns(logits, logits.shape[-1], ids, (class_start, num_classes), options)
    row_args = {"logits": logits, "target": target, "lse": lse, "lse_low": lse_low, "entropy": entropy}
    row_args |= {"grad_loss": row_grads[0], "grad_lse": row_grads[1], "grad_entropy": grad_entropy}
    slice_args = {"class_start": class_start, "num_classes": num_classes, "grad_dtype": grad_dtype}
    (grad_logits,) = writer.write("cross_entropy_backward", **row_args, **slice_args, **options.keywords())
    if mask_ids:  # this lse does not depend on the ids
        lse = torch.full_like(lse, math.inf)
    grad_lse, entropy, grad_entropy = reference.fold_low(lse_low, grad_lse, entropy, grad_entropy)
    column_args = (ids, at_ids, grad_ids, grad_lse, lse, grad_entropy, entropy, class_start, num_classes)
    return writer.write_columns(grad_logits, grad_dtype, *column_args, options=options)


def linear_token_logits(
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
    """(x of the ids (..., K), lse (...), entropy (...) or (0,), lse_low (...)) of a head's logits."""
    flat, chunking = as_rows(input), Chunking(**fields)
    target = _ops.row_targets(ids, ignore_index=options.ignore_index)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, linear_weight))
    products = backend.products(rows, flat, linear_weight, linear_bias, chunking)

    def visit(logits: Tensor, ids: Tensor) -> Sequence[Tensor]:
        return token_logits(logits, ids, with_entropy, mask_ids=mask_ids, options=options, writer=products)

    computed = products.run(visit, rows.pack_classes(ids))
    ignored = options.ignore_index if chunking.skip_ignored else None
    fills = (0.0, math.inf, 0.0 if with_entropy else None, 0.0)
    return tuple(unpack_statistics(rows, computed, fills, target, ignored))


def linear_token_logits_backward(
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
    lse_low: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    mask_ids: bool = False,
    class_start: int = 0,
    num_classes: int | None = None,
    *,
    options: RowOptions = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> HeadGradients:
    """As ``linear_cross_entropy_backward``."""
    flat, chunking = as_rows(input), Chunking(**fields)
    target = _ops.row_targets(ids, ignore_index=options.ignore_index)
    head, bias, _, padding = classes_of(linear_weight, linear_bias, None, class_start, num_classes)
    if head.shape[0] == 0:
        return no_gradients(input, linear_weight, output_mask)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, head))
    grads = [
        rows.pack(grad_ids.to(lse.dtype)),
        *(None if value is None else rows.pack_grads(value) for value in (grad_lse, grad_entropy)),
    ]
    values = [None if value is None else rows.pack(value) for value in (at_ids, lse, entropy, lse_low)]
    factors, row_grads = float16.split_grads(input.dtype, grads, rows.indices(), options)
    products = backend.products(rows, flat, head, bias, chunking, output_mask, accumulate_dtype, padding)
    gradient_options = {"options": options, "grad_dtype": products.grad_dtype, "writer": products, "mask_ids": mask_ids}
    gradient_options |= {"class_start": class_start, "num_classes": num_classes}

    def visit(
        logits: Tensor, grad_ids: Tensor, grad_lse: Tensor | None, grad_entropy: Tensor | None, *values: Any
    ) -> list[Tensor]:
        return [token_logits_backward(grad_ids, grad_lse, grad_entropy, logits, *values, **gradient_options)]

    if any(output_mask):
        shares = None if factors is None else factors.shares
        products.run(visit, *row_grads, rows.pack_classes(ids), *values, gradient=True, shares=shares)
    return in_dtype(products.gradients(input.shape, factors), input.dtype)
