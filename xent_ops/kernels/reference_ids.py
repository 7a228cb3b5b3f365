"""Several classes a row, ``ids`` (n, K): their x, and the gradient of their columns. Plain torch, on every device.

With g_k = d loss / d x of place k, and letters as in reference.cross_entropy_backward:

    grad_x_j = b p_j - c p_j (log p_j + H) + sum of g_k over the places k with id_k = j

Kernels write the first two terms over all columns. The columns of ids are written again here: all that flows into one
is added up before it is rounded, and equal ids write equal numbers, so that bits repeat.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .options import Options
from .reference import activation, activation_derivative, is_counted, softmax_gradient

_PAIRS = 4096  # of places of a row that are compared at a time: with 2048 rows 32 MiB, whatever K is


def first_counted(ids: Tensor, ignore_index: int) -> Tensor:
    """(...): the first id of a row that is counted; ignore_index where none is. What stands for the row's target."""
    ids = ids.to(torch.int64)
    place = is_counted(ids, ignore_index).to(torch.int8).argmax(-1, keepdim=True)
    return ids.gather(-1, place).squeeze(-1)


class Columns(NamedTuple):
    """Where the ids of rows are among the columns of a slice of the classes."""

    place: Tensor  # (n, K), safe to gather with
    here: Tensor  # (n, K): counted, and a column of this slice
    invalid: Tensor  # (n, K): counted, and no class


def columns(ids: Tensor, width: int, class_start: int, num_classes: int | None, ignore_index: int) -> Columns:
    ids = ids.to(torch.int64)
    counted, column = is_counted(ids, ignore_index), ids - class_start
    here = counted & (column >= 0) & (column < width)
    classes = width if num_classes is None else num_classes
    return Columns(torch.where(here, column, 0), here, counted & ((ids < 0) | (ids >= classes)))


def gather(logits: Tensor, at: Columns, options: Options) -> Tensor:
    """(n, K): x of the ids; 0 of those that are ignored or not here, NaN of those that are no class."""
    if logits.shape[1] == 0:
        x = logits.new_zeros(at.place.shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    else:
        x = torch.where(at.here, activation(logits.gather(1, at.place), options), 0.0)
    return torch.where(at.invalid, float("nan"), x)


def gradient(
    raw: Tensor,  # (n, K): the logits of the ids, gathered
    at: Columns,
    grad_ids: Tensor,  # (n, K)
    grad_lse: Tensor,  # (n,)
    lse: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    options: Options,
) -> Tensor:
    """(n, K): what belongs into the columns ``at.place`` of the logits' gradient."""
    x = activation(raw, options)
    of_row = softmax_gradient(x, lse, grad_lse.to(x.dtype), entropy, grad_entropy)
    passed = _added_up(at.place, torch.where(at.here, grad_ids.to(x.dtype), 0.0))
    # A row that passes nothing back gets exact zeros, whatever it holds; places that are ignored stand at column 0.
    live = (grad_lse != 0) if grad_entropy is None else (grad_lse != 0) | (grad_entropy != 0)
    live = live.unsqueeze(-1) | (passed != 0)
    return torch.where(live, (of_row + passed) * activation_derivative(x, options), 0.0).to(raw.dtype)


def _added_up(index: Tensor, values: Tensor) -> Tensor:
    """(n, K): of each place the sum of the values at the places of the same column."""
    places = index.shape[1]
    step = max(_PAIRS // places, 1)
    total = torch.zeros_like(values)
    for start in range(0, places, step):
        same = index.unsqueeze(2) == index[:, None, start : start + step]
        total = total + torch.where(same, values[:, None, start : start + step], 0.0).sum(2)
    return total
