"""Chooses the rows that a linear cross entropy computes: all, all and padding, or the counted ones packed to the front.

The host must know the number of computed rows. A CPU computes the counted rows only. On a GPU, reading their number
would synchronise. So all rows are kept, counted rows first, and products.py reads the number on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.reference import is_counted


def part_of(values: Tensor, chunk: slice) -> Tensor:
    """``values[chunk]``. A view takes the host some microseconds: none is made that changes nothing."""
    number = values.shape[0]
    is_all = type(number) is type(chunk.stop) is int and chunk.start == 0 and chunk.stop == number
    return values if is_all else values[chunk]


class ComputedRows:
    """All rows, (N,). Chunks cover the first ``number`` of them."""

    size: int | None = None  # the rows of every chunk. None: Products choose it

    def __init__(self, target: Tensor) -> None:
        self.dims = target.dim()
        self.target = target if self.dims == 1 else target.reshape(-1)
        self.number = self.target.shape[0]

    def pack(self, values: Tensor) -> Tensor:
        """(..., *), where ... is the target's shape, to (number, *); of a target (N,), the values themselves."""
        return values if self.dims == 1 else values.reshape(self.target.shape[0], *values.shape[self.dims :])

    def pack_grads(self, values: Tensor) -> Tensor:
        """The same for upstream gradients, one number a row: 0 in rows that are not computed."""
        return self.pack(values)

    def pack_classes(self, classes: Tensor) -> Tensor:
        """The same for class indices."""
        return self.pack(classes)

    def unpack(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """(number, *) to (N, *), with ``fill`` in rows that no chunk covers."""
        return values

    def indices(self) -> Tensor:
        """The targets, (number,)."""
        return self.target

    def select(self, input: Tensor, chunk: slice) -> Tensor:
        """The rows of a chunk of input (N, H)."""
        return part_of(input, chunk)


class PaddedRows(ComputedRows):
    """All rows, and ignored rows of zeros that fill up the last chunk: ``batch_invariant=True``.

    cuBLAS and oneDNN choose a kernel, and with it the order in which numbers are added up, by the shape of a product.
    So all chunks have ``size`` rows, for any number of rows. The library must still give a row the same bits at every
    place in a chunk. The doctor checks that.
    """

    def __init__(self, target: Tensor, ignore_index: int, size: int) -> None:
        super().__init__(target)
        self.size, self.ignore_index, self.added = size, ignore_index, -self.number % size
        self.number += self.added

    def pack(self, values: Tensor) -> Tensor:
        return filled_up(super().pack(values), self.added)

    def pack_classes(self, classes: Tensor) -> Tensor:
        return filled_up(super().pack(as_index(classes)), self.added, self.ignore_index)

    def unpack(self, values: Tensor, fill: float = 0.0) -> Tensor:
        return values[: self.target.shape[0]]

    def indices(self) -> Tensor:
        return filled_up(as_index(self.target), self.added, self.ignore_index)

    def select(self, input: Tensor, chunk: slice) -> Tensor:
        return whole_chunk(input[chunk], chunk.stop - chunk.start)


def as_index(classes: Tensor) -> Tensor:
    """In a dtype that holds an ignore_index of -100. uint8 does not."""
    return classes.to(torch.int64)


def filled_up(values: Tensor, added: int, fill: float = 0.0, dim: int = 0) -> Tensor:
    """The values with ``added`` places more at the end of this dimension."""
    return values if added == 0 else pad(values, (*(0, 0) * (values.dim() - 1 - dim), 0, added), value=fill)


def whole_chunk(rows: Tensor, size: int) -> Tensor:
    """(n, H) to (size, H), with zeros. The result is contiguous and starts at a multiple of 16 bytes."""
    if rows.shape[0] != size:
        return filled_up(rows, size - rows.shape[0])
    rows = rows.contiguous()
    has_memory = type(rows) is Tensor and not torch.compiler.is_compiling()
    return rows.clone() if has_memory and rows.data_ptr() % 16 else rows


class PackedRows(ComputedRows):
    """Some rows, in this order. ``count``, a tensor (), is the number of counted rows, which come first. None: all.

    ``kernels``: products that read the count (products.py). They need ``count``.
    """

    def __init__(self, target: Tensor, order: Tensor, count: Tensor | None = None, kernels: Any = None) -> None:
        super().__init__(target)
        self.order, self.number, self.count, self.kernels = order, order.shape[0], count, kernels

    def pack(self, values: Tensor) -> Tensor:
        return super().pack(values).index_select(0, self.order)

    def pack_grads(self, values: Tensor) -> Tensor:
        packed = self.pack(values)
        if self.count is None:
            return packed
        # No product writes the logits of rows after the count. Backward operators read the logits of every row with an
        # upstream gradient other than 0, and the head's gradients add up whole tiles of rows.
        return torch.where(torch.arange(self.number, device=packed.device) < self.count, packed, 0.0)

    def indices(self) -> Tensor:
        return self.target.index_select(0, self.order)

    def unpack(self, values: Tensor, fill: float = 0.0) -> Tensor:
        return values.new_full((self.target.shape[0], *values.shape[1:]), fill).index_copy_(0, self.order, values)

    def select(self, input: Tensor, chunk: slice) -> Tensor:
        return input.index_select(0, self.order[chunk])


def counted_rows(target: Tensor, ignore_index: int, kernels: Any) -> ComputedRows:
    """The counted rows. On a GPU this needs ``kernels``, products that read their number. Without them: all rows."""
    if target.numel() == 0:
        return ComputedRows(target)
    if target.device.type == "cpu":
        return _on_the_host(target, ignore_index)
    return ComputedRows(target) if kernels is None else _on_the_device(target, ignore_index, kernels)


def order_of_counted(target: Tensor, ignore_index: int, traced: bool) -> PackedRows | None:
    """The same for loop.py, whose operators look for these products themselves.

    None: all rows. While tracing for a CPU the number of counted rows is not known, so all rows are computed.
    """
    if target.numel() == 0 or (traced and target.device.type == "cpu"):
        return None
    return _on_the_host(target, ignore_index) if target.device.type == "cpu" else _on_the_device(target, ignore_index)


def _on_the_host(target: Tensor, ignore_index: int) -> PackedRows:
    """The counted rows only."""
    return PackedRows(target, is_counted(target.reshape(-1), ignore_index).nonzero().squeeze(1))


def _on_the_device(target: Tensor, ignore_index: int, kernels: Any = None) -> PackedRows:
    """All rows in their order, counted rows first."""
    counted = is_counted(target.reshape(-1), ignore_index)
    # A running sum and a scatter take 25 us, a sort 33 (8192 rows, one H200, 2026-11-23).
    counted_so_far = counted.cumsum(0)
    count, all_rows = counted_so_far[-1], torch.arange(counted.shape[0], device=target.device)
    place = torch.where(counted, counted_so_far - 1, count + all_rows - counted_so_far)
    order = torch.empty_like(place).scatter_(0, place, all_rows)
    return PackedRows(target, order, count, kernels)
