"""Several classes per row, ``ids`` (..., K): x of each, lse and entropy of logits, and their gradient.

The row operators compute the lse and the entropy; their target is one of the row's ids (``row_targets``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference, reference_ids
from ..kernels.options import DEFAULTS, RowOptions
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
    target = _ops.row_targets(ids, ignore_index=options.ignore_index)
    flags = (False, with_entropy, batch_invariant)
    _, lse, _, entropy, low, at_ids = statistics_with_ids(logits, target, ids, flags, mask_ids, options, writer)
    return at_ids, lse, entropy, low


def statistics_with_ids(
    logits: Tensor, target: Tensor, ids: Tensor, flags: Any, mask_ids: bool, options: RowOptions, writer: InPlace
) -> tuple[Tensor, ...]:
    """The results of ``cross_entropy_forward`` with these flags, and x of the ids. A row's target is one of its ids."""
    columns, keywords = logits.shape[-1], options.keywords()
    if mask_ids:
        at_ids, logits = writer.mask_columns(logits, columns, ids, (0, None), options)
    else:
        at_ids = _ops.ids_forward(logits, ids, **keywords)
    loss, lse, *others = _ops.cross_entropy_forward(logits, target, None, *flags, **keywords)
    lse = reference_ids.lse_of_others(lse, ids, columns, options=options) if mask_ids else lse
    return loss, lse, *others, at_ids


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
