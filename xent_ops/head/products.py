"""The three products of a linear cross entropy, a chunk of rows at a time: by torch, or by kernels that count rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import accelerators, devices, reference
from ..kernels.options import Chunking, Options
from ..kernels.sizes import symbolic, traced
from .packing import ComputedRows, PackedRows, counted_rows
from .sizes import padded_classes, rows_of_chunk


def accumulator_of_weight(dtype: torch.dtype, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which the chunks' parts of grad_linear_weight are added up."""
    return accumulate_dtype or (torch.float32 if dtype == torch.float16 else dtype)


def why_not_counting(input: Tensor, linear_weight: Tensor) -> str | None:
    """Why no products read the number of rows on the device, for input (N, H); None where there are such."""
    if accelerators.of(input.device) is None:
        return f"there are no such products for {input.device.type}"
    return _counting().why_not(input, linear_weight)


def counting_kernels(input: Tensor, linear_weight: Tensor) -> Any:
    """Products that read the number of rows on the device; None where there are none."""
    return _counting() if why_not_counting(input, linear_weight) is None else None


def _counting() -> Any:
    devices.triton_launchers()  # which says what to do where there is no Triton
    return importlib.import_module("xent_ops.kernels.triton.launch_product")


def rows_to_compute(
    target: Tensor, flat: Tensor, linear_weight: Tensor, options: Options, how: Chunking
) -> ComputedRows:
    if not how.skip_ignored:
        return ComputedRows(target)
    return counted_rows(target, options.ignore_index, counting_kernels(flat, linear_weight))


class Products:
    """Makes logits of chunks, and turns their gradients into those of input (N, H), linear_weight and linear_bias."""

    def __init__(
        self,
        rows: ComputedRows,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        chunk_rows: int | None,
        output_mask: Sequence[bool] = (False, False, False),
        accumulate_dtype: torch.dtype | None = None,
        padding: int = 0,  # rows of zeros behind the gradients of linear_weight and linear_bias
    ) -> None:
        self.rows, self.all_input, self.head, self.head_bias = rows, input, linear_weight, linear_bias
        self.mask, sums = output_mask, accumulator_of_weight(input.dtype, accumulate_dtype)
        new = input.new_zeros if isinstance(rows, PackedRows) else input.new_empty
        self.input = new(input.shape if output_mask[0] else 0)
        classes, features = linear_weight.shape
        shape = (classes + padding, features)
        self.padded_weight, self.padded_bias = room_for_head(input, shape, output_mask[1:], sums)
        self.weight, self.bias = self.padded_weight, self.padded_bias
        if padding > 0:
            self.weight, self.bias = self.weight[:classes], self.bias[:classes]
            zero_behind(self.padded_weight, self.padded_bias, classes)
        wider = output_mask[1] and sums != input.dtype
        self.size = rows_of_chunk(traced(rows.number), input, traced(classes), wider, chunk_rows)
        self.kernels = rows.kernels if isinstance(rows, PackedRows) else None
        if self.kernels is not None:
            assert isinstance(rows, PackedRows) and rows.count is not None
            firsts = torch.arange(0, rows.number, self.size, device=input.device)
            self.counts = (rows.count - firsts).clamp_(0, self.size).to(torch.int32)  # of each chunk

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """(which of the rows, their logits, which may be overwritten). Without rows one empty chunk."""
        number, classes = self.rows.number, self.head.shape[0]
        chunks, size = max(-(-traced(number) // self.size), 1), self.size
        if symbolic(number):  # in a package: as many chunks for every number of rows
            size = -(-number // chunks)
        # The counting kernels leave out rows that forward operators read, if only to mask what they make of them.
        new = self.all_input.new_empty if self.kernels is None or any(self.mask) else self.all_input.new_zeros
        memory = room_for_logits(new, size, classes, self.all_input)[:, :classes]
        for self.index in range(chunks):
            start, stop = (torch.sym_min(index * size, number) for index in (self.index, self.index + 1))
            chunk = slice(start, stop)
            logits, self.part = memory[: stop - start], self.rows.of(self.all_input, chunk)
            if self.kernels is not None:
                self.count = self.counts[self.index]
                self.kernels.logits(self.part, self.head, self.head_bias, self.count, logits)
            else:
                logits_of(self.part, self.head, self.head_bias, logits)
            yield chunk, logits

    def add(self, chunk: slice, gradient: Tensor) -> None:
        """The gradient of the logits that ``chunks`` has yielded last."""
        if self.kernels is not None and self.mask[1]:
            self.kernels.grad_weight(gradient, self.part, self.count, self.weight, add=self.index > 0)
        elif self.mask[1]:
            add_product(self.weight, gradient.t(), self.part, self.index == 0)
        del self.part  # its memory serves the next product
        if self.mask[0]:
            if not isinstance(self.rows, PackedRows):
                torch.mm(gradient, self.head, out=self.input[chunk])
            elif self.kernels is None:
                self.input.index_copy_(0, self.rows.order[chunk], torch.mm(gradient, self.head))
            else:
                self.kernels.grad_input(gradient, self.head, self.count, self.rows.order[chunk], self.input)
        if self.mask[2]:
            add_rows(self.bias, gradient, self.index == 0)


def room_for_logits(new: Callable[..., Tensor], rows: int, classes: int, input: Tensor) -> Tensor:
    """(rows, padded_classes), by ``new``, one of the input's."""
    padded = new((rows, padded_classes(classes, input.dtype)))
    if input.device.type == "cpu":  # see padded_classes
        padded[:, classes:].zero_()
    return padded


def room_for_head(
    input: Tensor, shape: Sequence[int], wanted: Sequence[bool], sums: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For the gradients of linear_weight, of this shape, and linear_bias: not initialised, (0,) if not wanted."""
    return (
        input.new_empty(tuple(shape) if wanted[0] else (0,), dtype=sums),
        input.new_empty(tuple(shape)[:1] if wanted[1] else (0,), dtype=reference.accumulator(input)),
    )


def zero_behind(grad_weight: Tensor, grad_bias: Tensor, classes: int) -> None:
    """The rows of a padded head."""
    if grad_weight.dim() == 2:
        grad_weight[classes:].zero_()
    grad_bias[classes:].zero_()


def logits_of(input: Tensor, head: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(input, head.t(), out=out)
    else:
        torch.addmm(bias, input, head.t(), out=out)


def add_rows(total: Tensor, rows: Tensor, first: bool) -> None:
    """total += the sum of the rows, in total's dtype; ``first`` starts it from zero."""
    added = rows.sum(0, dtype=total.dtype)
    total.copy_(added) if first else total.add_(added)


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right, which ``first`` starts from zero."""
    if total.dtype == left.dtype:
        torch.mm(left, right, out=total) if first else torch.addmm(total, left, right, out=total)
    elif (accelerator := accelerators.of(total.device)) is not None and accelerator.multiplies_into_float32:
        if first:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        add_product(total, left.to(total.dtype), right.to(total.dtype), first)
