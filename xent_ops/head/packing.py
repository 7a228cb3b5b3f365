"""Which rows a linear cross entropy computes: all, or the counted ones packed to the front.

How many rows are computed must be known on the host. On a CPU these are the counted ones. Elsewhere to ask how many
there are would synchronise: there they are the first ``max_counted``, counted ones before ignored ones, or all, of
which products.py takes as many as a number on the device says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.options import Chunking
from ..kernels.reference import is_counted


class ComputedRows:
    """All rows, (N,). Chunks see ``number`` of them."""

    def __init__(self, target: Tensor) -> None:
        self.target = target.reshape(-1)
        self.number = self.target.shape[0]

    def take(self, values: Tensor) -> Tensor:
        """One value a row, (...) to (number,)."""
        return values.reshape(-1)

    def give(self, values: Tensor, otherwise: float) -> Tensor:
        """(number,) to (N,), with that value in rows that no chunk sees."""
        return values

    def indices(self) -> Tensor:
        """The targets, (number,)."""
        return self.target

    def of(self, input: Tensor, chunk: slice) -> Tensor:
        """Those rows of input (N, H)."""
        return input[chunk]


class PackedRows(ComputedRows):
    """Some rows, in this order. ``count``, (), says how many are counted: those come first. None: all are.

    ``kernels``: products that read the count (products.py); None where there are none.
    """

    def __init__(
        self, target: Tensor, ignore_index: int, order: Tensor, count: Tensor | None = None, kernels: Any = None
    ) -> None:
        super().__init__(target)
        self.kernels = kernels
        self.ignore_index, self.order, self.number, self.count = ignore_index, order, order.shape[0], count

    def take(self, values: Tensor) -> Tensor:
        return values.reshape(-1).index_select(0, self.order)

    def give(self, values: Tensor, otherwise: float) -> Tensor:
        given = values.new_full(self.target.shape, otherwise).index_copy_(0, self.order, values)
        if self.count is None or self.number == len(given) or not given.is_floating_point():
            return given
        return given.masked_fill_(self.count > self.number, float("nan"))  # there was no room for all counted rows

    def indices(self) -> Tensor:
        indices = self.take(self.target)
        if self.count is None or self.number == self.target.shape[0]:
            return indices
        # More counted rows than there is room for: then all have a target that is none, whose gradients are NaN.
        none = -1 if self.ignore_index != -1 else -2
        return torch.where(self.count > self.number, none, indices.to(torch.int64))

    def of(self, input: Tensor, chunk: slice) -> Tensor:
        return input.index_select(0, self.order[chunk])


def rows_of(target: Tensor, ignore_index: int, how: Chunking, kernels: Any) -> ComputedRows:
    """``kernels``: products that read the number of rows on the device, or None."""
    if target.numel() == 0 or not how.skips:
        return ComputedRows(target)
    if target.device.type == "cpu":
        return _on_the_host(target, ignore_index, how.max_counted)
    if kernels is not None or how.max_counted is not None:
        return _on_the_device(target, ignore_index, how.max_counted, kernels)
    return ComputedRows(target)


def _on_the_host(target: Tensor, ignore_index: int, max_counted: int | None) -> PackedRows:
    """The counted rows alone."""
    refuse_more_than(max_counted, target, ignore_index)
    return PackedRows(target, ignore_index, is_counted(target.reshape(-1), ignore_index).nonzero().squeeze(1))


def refuse_more_than(max_counted: int | None, target: Tensor, ignore_index: int) -> None:
    """Reads the target."""
    if max_counted is not None and (number := int(is_counted(target, ignore_index).sum())) > max_counted:
        raise ValueError(f"{number} rows are counted; expected at most max_counted={max_counted}")


def _on_the_device(target: Tensor, ignore_index: int, max_counted: int | None, kernels: Any) -> PackedRows:
    """Counted rows first, in their order; all or the first ``max_counted``."""
    counted = is_counted(target.reshape(-1), ignore_index)
    # By a running sum and a scatter: 25 us, where to sort takes 33 (8192 rows, one H200, 2026-11-23).
    before = counted.cumsum(0)
    count, all_rows = before[-1], torch.arange(counted.shape[0], device=target.device)
    place = torch.where(counted, before - 1, count + all_rows - before)
    order = torch.empty_like(place).scatter_(0, place, all_rows)
    return PackedRows(target, ignore_index, order[:max_counted], count, kernels)
