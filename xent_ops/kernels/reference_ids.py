"""Several classes per row, ``ids`` (n, K): their x, and the gradient of their columns.

g_k is d loss / d x of the k-th id. The other letters are those of reference.cross_entropy_backward:

    grad_x_j = b p_j - c p_j (log p_j + H) + sum of g_k over all k with id_k = j

Kernels write the first two terms over all columns. The functions here then write the columns of the ids again. They add
up the gradients of a column before rounding, and equal ids write equal numbers, so results repeat bit for bit.

With ``mask_ids`` the lse is over all other classes: the columns of the ids are masked before the kernels read them. So
the lse is accurate even if the ids have nearly all probability. The lse of all is log(exp(lse) + sum of exp(x) of ids).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .options import DEFAULTS, RowOptions
from .reference import accumulator, activation, activation_derivative, is_counted, softmax_gradient

_PAIRS = 4096  # pairs of a row's ids that are compared at a time: with 2048 rows 32 MiB, for any K


def row_targets(ids: Tensor, *, options: RowOptions = DEFAULTS) -> Tensor:
    """(...): a counted id of each row, which serves as its target, or ignore_index if there is none.

    If an id is no class, it is such a one: then the row operators give NaN, or raise. So it is the largest id, or the
    smallest if that is below 0.
    """
    ids = ids.to(torch.int64)
    counted = is_counted(ids, options.ignore_index)
    smallest, largest = torch.where(counted, ids, 0).amin(-1), torch.where(counted, ids, -1).amax(-1)
    return torch.where(smallest < 0, smallest, torch.where(largest < 0, options.ignore_index, largest))


class Columns(NamedTuple):
    """The places of the ids of rows among the columns of a slice of the classes."""

    column: Tensor  # (..., K), safe to gather with
    here: Tensor  # (..., K): counted, and a column of this slice
    invalid: Tensor  # counted, and no class


def columns(ids: Tensor, width: int, class_start: int, num_classes: int | None, ignore_index: int) -> Columns:
    ids = ids.to(torch.int64)
    counted, column = is_counted(ids, ignore_index), ids if num_classes is None else ids - class_start
    safe = column.clamp(0, width - 1)
    here = counted & (safe == column)
    invalid = counted ^ here if num_classes is None else counted & ((ids < 0) | (ids >= num_classes))
    return Columns(safe, here, invalid)


def gather(logits: Tensor, at: Columns, options: RowOptions) -> Tensor:
    """(..., K): x of the ids. 0 for ids that are ignored or not in this slice, NaN for ids that are no class."""
    if logits.shape[-1] == 0:
        x = logits.new_zeros(at.here.shape, dtype=accumulator(logits))
    else:
        x = torch.where(at.here, activation(logits.gather(-1, at.column), options), 0.0)
    return torch.where(at.invalid, float("nan"), x)


def ids_forward(
    logits: Tensor, ids: Tensor, class_start: int = 0, num_classes: int | None = None, *, options: RowOptions = DEFAULTS
) -> Tensor:
    """``gather`` as an operator."""
    return gather(logits, columns(ids, logits.shape[-1], class_start, num_classes, options.ignore_index), options)


def mask_ids_(
    logits: Tensor, ids: Tensor, class_start: int = 0, num_classes: int | None = None, *, options: RowOptions = DEFAULTS
) -> Tensor:
    """``ids_forward``, and the columns of the ids in this slice are masked."""
    at = columns(ids, logits.shape[-1], class_start, num_classes, options.ignore_index)
    x = gather(logits, at, options)
    if logits.shape[-1] > 0:
        logits.scatter_(-1, *masked(logits, at, options))
    return x


def ids_grad_(grad_logits: Tensor, *args: Any, **keywords: Any) -> None:
    """Write the columns of the ids in this slice. The arguments are those of ``_column_values``."""
    if grad_logits.shape[-1] > 0:
        grad_logits.scatter_(-1, *_column_values(grad_logits, *args, **keywords))


def ids_grad(grad_logits: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """The same as ``ids_grad_``, on a copy."""
    if grad_logits.shape[-1] == 0:
        return grad_logits.clone()
    return grad_logits.scatter(-1, *_column_values(grad_logits, *args, **keywords))


def _column_values(
    grad_logits: Tensor,  # (..., columns)
    ids: Tensor,  # (..., K)
    at_ids: Tensor,  # (..., K): x
    grad_ids: Tensor,
    grad_lse: Tensor,  # (...)
    lse: Tensor,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, Tensor]:
    """(column, value), each (..., K): the columns to write, and their values."""
    at = columns(ids, grad_logits.shape[-1], class_start, num_classes, options.ignore_index)
    x, lse, grad_of_lse = (value.to(accumulator(lse)) for value in (at_ids, lse, grad_lse))
    entropy = None if entropy is None else entropy.to(x.dtype)
    own_gradient = softmax_gradient(x, lse, grad_of_lse, entropy, grad_entropy)
    passed = _added_up(at, grad_ids.to(x.dtype))
    live = (grad_lse != 0) if grad_entropy is None else (grad_lse != 0) | (grad_entropy != 0)
    value = torch.where(live.unsqueeze(-1), own_gradient, 0.0) + passed
    # Without an upstream gradient the result is exactly zero, for any x.
    value = torch.where(value != 0, value * activation_derivative(x, options), 0.0).to(grad_logits.dtype)
    return _to_write(at, value, grad_logits)


def _to_write(at: Columns, value: Tensor | float, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(column, value), each (..., K). ``value``: for the ids in this slice."""
    # An id outside this slice repeats the write of the first id in it. If there is none, a column keeps its value.
    first = at.here.to(torch.int8).argmax(-1, keepdim=True)
    column = torch.where(at.here, at.column, at.column.gather(-1, first))
    if isinstance(value, Tensor):
        value = torch.where(at.here, value, value.gather(-1, first))
    return column, torch.where(at.here.any(-1, keepdim=True), value, logits.gather(-1, column))


def masked(logits: Tensor, at: Columns, options: RowOptions) -> tuple[Tensor, Tensor]:
    """(column, value), each (..., K): the columns to mask, and with what. ``logits``: at least one column."""
    return _to_write(at, float("-inf") if options.is_increasing else float("inf"), logits)


def lse_of_others(
    lse: Tensor,
    ids: Tensor,
    width: int,
    class_start: int = 0,
    num_classes: int | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> Tensor:
    """(...): the lse of the columns that were not masked, from the kernels' lse of all ``width`` columns."""
    if options.softcap is None:  # x of a masked logit is -inf
        return lse
    at = columns(ids, width, class_start, num_classes, options.ignore_index)
    column = torch.where(at.here, at.column, -1).sort(dim=-1).values
    number = (column[..., 1:] != column[..., :-1]).sum(-1) + (column[..., 0] >= 0)
    share = number * torch.exp(-options.softcap - lse)  # x of a masked logit is -softcap
    return torch.where(number == width, float("-inf"), lse + torch.log1p(-share))


def _added_up(at: Columns, values: Tensor) -> Tensor:
    """(..., K): for each id the sum of the values of all equal ids."""
    ids_per_row = at.column.shape[-1]
    step = max(_PAIRS // ids_per_row, 1)
    values, total = torch.where(at.here, values, 0.0), torch.zeros_like(values)
    for start in range(0, ids_per_row, step):
        part = slice(start, start + step)
        same = at.column.unsqueeze(-1) == at.column[..., part].unsqueeze(-2)
        total = total + torch.where(same, values[..., part].unsqueeze(-2), 0.0).sum(-1)
    return total
