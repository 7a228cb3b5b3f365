"""Products for exporters, whose graphs have no memory to write to.

Chunks are nodes of the graph. A known number of rows is unrolled into chunks; a symbolic number is one chunk, and the
exporter plans the memory. Ignored rows are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference, reference_ids
from ..kernels.options import Chunking, RowOptions
from ..kernels.reference_with_grad import scaled_grad
from ..kernels.rows import padded_classes
from ..kernels.sizes import size_hint, symbolic
from .backend import Backend, rows_to_compute
from .float16 import RowFactors, times
from .packing import ComputedRows, whole_chunk
from .products import OutOfPlace, Products, accumulator_of_weight, concatenated
from .sizes import rows_of_chunk


class Functional(OutOfPlace):
    def write_columns(
        self, gradient: Tensor, dtype: torch.dtype | None, *column_args: Any, options: RowOptions
    ) -> Tensor:
        return reference_ids.ids_grad(gradient, *column_args, options=options)

    def mask_columns(
        self, logits: Tensor, columns: int, ids: Tensor, class_range: tuple[int, int | None], options: RowOptions
    ) -> tuple[Tensor, Tensor]:
        at = reference_ids.columns(ids, columns, *class_range, options.ignore_index)
        at_ids = reference_ids.gather(logits[..., :columns], at, options)
        return at_ids, logits.scatter(-1, *reference_ids.masked(logits, at, options)) if columns > 0 else logits


class ExportedProducts(Functional, Products):
    """The loop of ``Products``, whose chunks and sums are nodes."""

    def __init__(
        self,
        rows: ComputedRows,
        input: Tensor,
        head: Tensor,
        bias: Tensor | None,
        chunking: Chunking,
        mask: Sequence[bool] = (False, False, False),
        accumulate_dtype: torch.dtype | None = None,
        padding: int = 0,
    ) -> None:
        if chunking.products is not None:
            raise NotImplementedError(
                f"products={chunking.products!r} cannot be exported: core aten has no such products"
            )
        self.rows, self.all_input, self.head, self.head_bias, self.mask = rows, input, head, bias, mask
        self.dtype = chunking.logits_dtype
        self.sum_dtype = accumulator_of_weight(input.dtype, accumulate_dtype)
        self.padding = padding
        self.grad_dtype = None if self.dtype in (None, input.dtype) else input.dtype
        number = rows.number
        self.starts: Sequence[int] = (0,)
        self.size = number
        if not (symbolic(number) or symbolic(chunking.chunk_rows)):
            chunk_rows = rows.size or chunking.chunk_rows
            self.size = rows_of_chunk(number, input, size_hint(head.shape[0]), False, chunk_rows, chunking.logits_dtype)
            self.starts = range(0, max(number, 1), self.size)
        self.grads: list[list[Tensor]] = [[], [], []]

    def part_of(self, values: Tensor, chunk: slice) -> Tensor:
        return values if len(self.starts) == 1 else values[chunk]

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        for start in self.starts:
            chunk = slice(start, start + self.size)
            self.x = self.part_of(self.all_input, chunk)
            if self.rows.size is not None:
                self.x = whole_chunk(self.x, min(self.size, self.rows.number - start))
            yield chunk, logits_of(self.x, self.head, self.head_bias, self.dtype)

    def add(self, chunk: slice, logits: Tensor) -> None:
        x, gradient = self.x, logits.to(self.all_input.dtype)
        shares = None if self.shares is None else self.part_of(self.shares, chunk)
        if self.mask[0]:
            self.grads[0].append(torch.mm(gradient, self.head))
        if self.mask[1]:
            self.grads[1].append(torch.mm(gradient.t().to(self.sum_dtype), times(x, shares).to(self.sum_dtype)))
        if self.mask[2]:
            dtype = reference.accumulator(x)
            self.grads[2].append(times(gradient.to(dtype), shares).sum(0))

    def gradients(self, shape: torch.Size, factors: RowFactors | None = None) -> tuple[Tensor, Tensor, Tensor]:
        none, dtypes = self.all_input.new_empty(0), (self.sum_dtype, reference.accumulator(self.all_input))
        grad_input = self.rows.unpack(concatenated(self.grads[0])).view(shape) if self.grads[0] else none
        weight, bias = (
            sum(parts[1:], parts[0]) if parts else none.to(t) for parts, t in zip(self.grads[1:], dtypes, strict=True)
        )
        if self.padding:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, self.padding)) if self.mask[1] else weight
            bias = torch.nn.functional.pad(bias, (0, self.padding)) if self.mask[2] else bias
        if factors is not None:
            if self.mask[0]:
                row_factors = self.rows.unpack(factors.rows).view(*shape[:-1], 1)
                grad_input = (grad_input * row_factors).to(grad_input.dtype)
            weight, bias = (scaled_grad(grad, factors.largest) for grad in (weight, bias))
        return grad_input, weight, bias


def logits_of(input: Tensor, head: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    if dtype not in (None, input.dtype):
        input, head, bias = input.to(dtype), head.to(dtype), None if bias is None else bias.to(dtype)
    return torch.mm(input, head.t()) if bias is None else torch.addmm(bias, input, head.t())


def linear_logits(
    input: Tensor,
    head: Tensor,
    bias: Tensor | None = None,
    count: Tensor | None = None,
    after: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """That of chunk.py."""
    logits = logits_of(input, head, bias, logits_dtype)
    return torch.nn.functional.pad(logits, (0, padded_classes(head.shape[0], logits.dtype) - head.shape[0]))


def linear_scale_grad(grad: Tensor, factor: Tensor) -> Tensor:
    """Always a copy: an operator must not return one of its arguments."""
    return scaled_grad(grad, factor).contiguous()


def _rows_to_compute(
    target: Tensor, ignore_index: int, chunking: Chunking, *heads: tuple[Tensor, Tensor]
) -> ComputedRows:
    if chunking.batch_invariant and symbolic(target.numel()):
        raise NotImplementedError(
            "batch_invariant=True of a dynamic number of rows cannot be exported to core aten, which has no loop over "
            "chunks of one shape: export a fixed number of rows, or keep the operators"
        )
    return rows_to_compute(target, ignore_index, chunking._replace(skip_ignored=False), *heads)


EXPORTED = Backend(ExportedProducts, _rows_to_compute)
