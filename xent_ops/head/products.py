"""The three products of a linear cross entropy for one chunk of rows: by torch, or by kernels that read a row count."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import accelerators, devices, reference
from ..kernels.options import Chunking, RowOptions
from ..kernels.rows import first_columns, front_of, padded_classes
from ..kernels.sizes import size_hint, symbolic
from .float16 import RowFactors, times
from .packing import ComputedRows, PackedRows, part_of
from .sizes import rows_of_chunk

_ops = torch.ops.xent

# The work of a loss on a chunk: (logits of each head, values of its rows) -> statistics of its rows. If the head's
# gradients are wanted, the gradient of the logits is the last result.
Visit = Callable[..., Sequence[Tensor]]


def accumulator_of_weight(dtype: torch.dtype, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which the chunks' parts of grad_linear_weight are added up."""
    return accumulate_dtype or (torch.float32 if dtype == torch.float16 else dtype)


def why_not_counting(input: Tensor, linear_weight: Tensor) -> str | None:
    """The reason why no product of input (N, H) reads the number of rows on the device, or None if products do."""
    if accelerators.of(input.device) is None:
        return f"there are no such products for {input.device.type}"
    return _counting().why_not(input, linear_weight)


def counting_kernels(input: Tensor, linear_weight: Tensor) -> Any:
    """Products that read the number of rows on the device, or None if there are none."""
    return _counting() if why_not_counting(input, linear_weight) is None else None


def _counting() -> Any:
    devices.triton_launchers()  # raises without Triton, and says how to install it
    return importlib.import_module("..kernels.triton.launch_product", __package__)


class InPlace:
    """Row operators write the gradient of logits over the logits."""

    def write(self, name: str, **arguments: Any) -> tuple[Tensor, ...]:
        """(other results, gradient) of a row operator with an in-place form."""
        results = getattr(_ops, f"{name}_")(**arguments)
        other_results = () if results is None else results if isinstance(results, (tuple, list)) else (results,)
        return *other_results, arguments["logits"]

    def write_columns(
        self, gradient: Tensor, dtype: torch.dtype | None, *column_args: Any, options: RowOptions
    ) -> Tensor:
        """Write the columns of the ids into a gradient of this dtype."""
        _ops.ids_grad_(front_of(gradient, dtype), *column_args, **options.keywords())
        return gradient

    def mask_columns(
        self, logits: Tensor, columns: int, ids: Tensor, class_range: tuple[int, int | None], options: RowOptions
    ) -> tuple[Tensor, Tensor]:
        """(x of the ids, the logits). The columns of the ids, among the first ``columns``, are masked."""
        return _ops.mask_ids_(logits[..., :columns], ids, *class_range, **options.keywords()), logits


class OutOfPlace(InPlace):
    """Row operators allocate the gradient of logits."""

    def write(self, name: str, **arguments: Any) -> tuple[Tensor, ...]:
        results = getattr(_ops, name)(**arguments)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def mask_columns(
        self, logits: Tensor, columns: int, ids: Tensor, class_range: tuple[int, int | None], options: RowOptions
    ) -> tuple[Tensor, Tensor]:
        return super().mask_columns(logits.clone(), columns, ids, class_range, options)


class Products(InPlace):
    """Computes logits of chunks, and from their gradients those of input (N, H), linear_weight and linear_bias."""

    other_heads: Sequence[Products] = ()  # other heads, whose chunks have the same rows
    shares: Tensor | None = None  # factors of rows, while ``run`` makes gradients

    def __init__(
        self,
        rows: ComputedRows,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        chunking: Chunking,
        output_mask: Sequence[bool] = (False, False, False),
        accumulate_dtype: torch.dtype | None = None,
        padding: int = 0,  # rows of zeros at the end of the gradients of linear_weight and linear_bias
    ) -> None:
        self.logits_dtype = chunking.logits_dtype or input.dtype
        self.grad_dtype = None if self.logits_dtype == input.dtype else input.dtype
        self.rows, self.all_input, self.head, self.head_bias = rows, input, linear_weight, linear_bias
        self.mask, sum_dtype = output_mask, accumulator_of_weight(input.dtype, accumulate_dtype)
        packed = isinstance(rows, PackedRows)
        shape = (input.shape[0] if packed else rows.number, input.shape[1]) if output_mask[0] else (0,)
        self.input = (torch.zeros if packed else torch.empty)(shape, dtype=input.dtype, device=input.device)
        classes, features = linear_weight.shape
        shape = (classes + padding, features)
        self.padded_weight, self.padded_bias = self._gradient_memory(shape, sum_dtype)
        self.weight, self.bias = self.padded_weight, self.padded_bias
        if padding > 0:
            self.weight, self.bias = self.weight[:classes], self.bias[:classes]
            zero_behind(self.padded_weight, self.padded_bias, classes)
        wider = output_mask[1] and sum_dtype != input.dtype
        chunk_rows = rows.size or chunking.chunk_rows
        self.size = self._rows_of_chunk(size_hint(rows.number), size_hint(classes), wider, chunk_rows)
        self.kernels = rows.kernels if isinstance(rows, PackedRows) else None
        if self.kernels is not None:
            assert isinstance(rows, PackedRows) and rows.count is not None
            firsts = torch.arange(0, rows.number, self.size, device=input.device)
            self.counts = (rows.count - firsts).clamp_(0, self.size).to(torch.int32)  # of each chunk

    def _gradient_memory(self, shape: tuple[int, int], sum_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return head_gradients(self.all_input, shape, self.mask[1:], sum_dtype)

    def _columns(self) -> int:
        return self.head.shape[0]

    def _rows_of_chunk(self, number: int, classes: int, wider: bool, chunk_rows: int | None) -> int:
        return rows_of_chunk(number, self.all_input, classes, wider, chunk_rows, self.logits_dtype)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """(the chunk's rows, their logits). The caller may overwrite the logits. Without rows: one empty chunk."""
        number, columns = self.rows.number, self._columns()
        chunks, size = max(-(-size_hint(number) // self.size), 1), self.size
        if symbolic(number):  # in a package: the same number of chunks for every number of rows
            size = -(-number // chunks)
        # The counting kernels leave rows unwritten that forward operators read, even if these only mask the result.
        new = torch.empty if self.kernels is None or any(self.mask) else torch.zeros
        shape = (size, padded_classes(columns, self.logits_dtype))
        memory = new(shape, dtype=self.logits_dtype, device=self.all_input.device)
        if memory.device.type == "cpu":  # see padded_classes
            memory[:, columns:].zero_()
        memory = first_columns(memory, self.head.shape[0])
        for self.index in range(chunks):
            start, stop = (torch.sym_min(index * size, number) for index in (self.index, self.index + 1))
            chunk = slice(start, stop)
            logits, self.part = part_of(memory, slice(0, stop - start)), self.rows.select(self.all_input, chunk)
            self._write_logits(chunk, logits)
            yield chunk, logits

    def _write_logits(self, chunk: slice, logits: Tensor) -> None:
        if self.kernels is not None:
            self.count = self.counts[self.index]
            self.kernels.logits(self.part, self.head, self.head_bias, self.count, logits)
        else:
            logits_of(self.part, self.head, self.head_bias, logits)

    def part_of(self, values: Tensor, chunk: slice) -> Tensor:
        return part_of(values, chunk)

    def run(
        self, visit: Visit, *values: Tensor | None, gradient: bool = False, shares: Tensor | None = None
    ) -> list[Tensor]:
        """The statistics of all computed rows. With ``gradient`` the head's gradients are added up too.

        ``values``: (number, ...), values of these rows. ``visit`` gets the values of one chunk. ``shares``, (number,):
        factors of the rows in the gradients of the weight and the bias (float16.py).
        """
        statistics, self.shares = [], shares
        heads = (self, *self.other_heads)
        for chunks in zip(*(products.chunks() for products in heads), strict=True):
            chunk = chunks[0][0]
            chunk_values = [None if value is None else self.part_of(value, chunk) for value in values]
            results = visit(*(logits for _, logits in chunks), *chunk_values)
            if gradient:
                *results, grad_logits = results
                self.add(chunk, grad_logits)
            statistics.append(results)
        return [concatenated(parts) for parts in zip(*statistics, strict=True)]

    def gradients(self, shape: torch.Size, factors: RowFactors | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the input (in this shape), the weight and the bias in their sums' dtypes, times ``factors``."""
        if self.rows.size is not None:
            self.input = self.rows.unpack(self.input)
        if factors is not None:
            if self.mask[0]:
                self.input.mul_(self.rows.unpack(factors.rows).unsqueeze(1))
            for gradient in (self.padded_weight, self.padded_bias):
                _ops.scale_grad_(gradient, factors.largest)
        input = self.input if not self.mask[0] or len(shape) == 2 else self.input.view(shape)
        return input, self.padded_weight, self.padded_bias

    def add(self, chunk: slice, logits: Tensor) -> None:
        """Add the products of the last chunk from ``chunks``. Its gradient is written over its logits."""
        gradient, shares = gradient_in(logits, self.grad_dtype), None
        if self.shares is not None:
            shares = self.shares[chunk]
            self.part = times(self.part, shares) if self.mask[1] else self.part
        if self.kernels is not None and self.mask[1]:
            self.kernels.grad_weight(gradient, self.part, self.count, self.weight, add=self.index > 0)
        elif self.mask[1]:
            add_product(self.weight, gradient.transpose(0, 1), self.part, self.index == 0)
        del self.part  # the next product reuses its memory
        if self.mask[0]:
            if not isinstance(self.rows, PackedRows):
                write_product(gradient, self.head, part_of(self.input, chunk))
            elif self.kernels is None:
                self.input.index_copy_(0, self.rows.order[chunk], torch.mm(gradient, self.head))
            else:
                self.kernels.grad_input(gradient, self.head, self.count, self.rows.order[chunk], self.input)
        if self.mask[2]:
            add_rows(self.bias, gradient, self.index == 0, shares)


def concatenated(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The results of all chunks, one after the other. That of a single chunk is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def gradient_in(logits: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The gradient of this dtype that was written over the logits, in the form that products take."""
    gradient = front_of(logits, dtype)
    if gradient is not logits and logits.device.type == "cpu":
        # See padded_classes. Behind the gradient are halves of float32 numbers, and oneDNN reads blocks of 64.
        classes = logits.shape[1]
        logits.view(gradient.dtype)[:, classes : classes + 64].zero_()
    return gradient


def head_gradients(
    input: Tensor, shape: Sequence[int], output_mask: Sequence[bool], sum_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Uninitialised memory for the gradients of linear_weight (of this shape) and linear_bias; (0,) if not wanted."""
    weight_shape, device = tuple(shape), input.device
    return (
        torch.empty(weight_shape if output_mask[0] else (0,), dtype=sum_dtype, device=device),
        torch.empty(weight_shape[:1] if output_mask[1] else (0,), dtype=reference.accumulator(input), device=device),
    )


def zero_behind(grad_weight: Tensor, grad_bias: Tensor, classes: int) -> None:
    """Write zeros to the padding rows of a head's gradients."""
    for gradient in (grad_weight, grad_bias):
        if gradient.shape[0] > classes:
            gradient[classes:].zero_()


def logits_of(input: Tensor, head: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Logits in the dtype of ``out``. It may be float32 for 16-bit operands; then nothing is rounded to 16 bits."""
    out_dtype: dict[str, Any] = {}
    if out.dtype != input.dtype:
        bias = None if bias is None else bias.to(out.dtype)
        if multiplies_into_float32(out):
            out_dtype["out_dtype"] = out.dtype
        else:
            input, head = input.to(out.dtype), head.to(out.dtype)
    input = aligned_rows(input)
    if bias is None:
        torch.mm(input, head.transpose(0, 1), out=out, **out_dtype)
    else:
        torch.addmm(bias, input, head.transpose(0, 1), out=out, **out_dtype)


def _padding(rows: Tensor) -> int:
    """Columns that make the length of a row (n, H) a multiple of 16 bytes, where MKL multiplies; else 0.

    Otherwise MKL's kernels for few classes or features, and all for float64, give a row bits that depend on its place.
    """
    return 0 if rows.device.type != "cpu" or rows.element_size() < 4 else -rows.shape[1] % (16 // rows.element_size())


def aligned_rows(rows: Tensor) -> Tensor:
    """Contiguous rows (n, H), copied if they need padding."""
    padding = _padding(rows)
    return torch.nn.functional.pad(rows, (0, padding))[:, :-padding] if padding else rows


def write_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right, in rows that are padded while MKL writes them."""
    padding = _padding(right)
    if not padding:
        return torch.mm(left, right, out=out)
    memory = right.new_empty(left.shape[0], right.shape[1] + padding)[:, :-padding]
    product = torch.mm(left, right, out=memory)
    return product.contiguous() if out is None else out.copy_(product)


def multiplies_into_float32(result: Tensor) -> bool:
    """Can torch.mm(out_dtype=) write this result of narrower operands? cuBLAS writes float32 of 16-bit ones alone."""
    accelerator = accelerators.of(result.device)
    return accelerator is not None and accelerator.multiplies_into_float32 and result.dtype == torch.float32


def add_rows(total: Tensor, rows: Tensor, first: bool, factors: Tensor | None = None) -> None:
    """total += the sum of the rows times their factors, in total's dtype. With ``first`` the total starts at zero."""
    if factors is not None:
        add_product(total.unsqueeze(1), rows.t(), factors.to(rows.dtype).unsqueeze(1), first)
        return
    added = rows.sum(0, dtype=total.dtype)
    total.copy_(added) if first else total.add_(added)


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right. With ``first`` the total starts at zero."""
    if total.dtype == left.dtype:
        torch.mm(left, right, out=total) if first else torch.addmm(total, left, right, out=total)
    elif multiplies_into_float32(total):
        if first:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        add_product(total, left.to(total.dtype), right.to(total.dtype), first)
