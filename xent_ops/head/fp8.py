"""The three products of a head with 8-bit numbers (e4m3). kernels/reference_fp8.py describes the rounding.

``products="fp8"`` uses 8 bits in all three products. "fp8_gradients" uses them for the gradients only, and takes logits
and statistics from 16-bit products. An 8-bit operand must be dense along its product's sum, so each matrix is stored in
every layout that its products need:

    logits       input (N, H)                       weight (V, H)
    grad_input   gradient (n, V) of a chunk         weight (H, V)
    grad_weight  gradient (V, S) of a block         input (H, S), times each row's bound
    S            rows of a block of chunks: all, up to 1 GiB of V x S

A row's bound is the number that its gradient was divided by. Later the row of grad_input is multiplied by it. The
product for the weight is computed once per block. If every chunk of 2048 rows added to the weight's gradient, reading
and writing it would cost .15 of the three products at 8192 x 4096 x 128256. With a single block, the weight's 8-bit
copies are stored in the memory of its gradient: the last product to read them is the one that writes this gradient.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..kernels import accelerators, devices, reference_fp8, reference_with_grad
from ..kernels.options import Chunking, RowOptions, as_record
from ..kernels.reference_fp8 import DTYPE, LARGEST
from .packing import PackedRows
from .products import Products, head_gradients, zero_behind
from .sizes import evenly

_ops = torch.ops.xent

MULTIPLE = 16  # sizes along a product's sum are multiples of it
CAPABILITY = (8, 9)  # the first compute capability that multiplies 8-bit numbers
_CHUNK_BYTES = 2**29  # a chunk's logits and, stored by rows, their gradient
_STEP = 128  # chunks have a multiple of so many rows, unless they have fewer
_MOST_ROWS = 2**20  # of a chunk: a launch has at most 65535 tiles of rows
_BLOCK_BYTES = 2**30  # the gradient of a block, if the block has all rows
_PART_BYTES = 2**29  # else: the weight's copies then have their own memory
_SLAB = 4096  # classes per product that is added to the weight's gradient


def why_not(device: torch.device) -> str | None:
    """The reason why 8-bit products do not run here, or None if they do. On a CPU they are plain torch."""
    accelerator = accelerators.of(device)
    if device.type in ("cpu", "meta"):
        return None
    if accelerator is None or (capability := accelerator.capability(device)) is None:
        return f"they were written for NVIDIA's GPUs, and for the CPU in plain torch, not for {device.type}"
    if capability < CAPABILITY:
        return f"they need compute capability 8.9 or more, and this GPU has {capability[0]}.{capability[1]}"
    return None


def _kernels(device: torch.device) -> Any:
    if accelerators.of(device) is None:
        return reference_fp8
    devices.triton_launchers()  # raises without Triton, and says how to install it
    return importlib.import_module("..kernels.triton.launch_fp8", __package__)


def _multiple(number: int) -> int:
    return -(-number // MULTIPLE) * MULTIPLE


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(tensor, float("inf"), dtype=torch.float32)


def _forward(*args: Any, options: RowOptions) -> tuple[Tensor, ...]:
    return _ops.cross_entropy_forward(*args, **options.keywords())


class Fp8Products(Products):
    """``Products`` of 8-bit numbers. The gradient of a chunk's logits is stored in both layouts, and not over them."""

    def __init__(
        self,
        rows: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        chunking: Chunking,
        *gradient_args: Any,
    ) -> None:
        self.fp8 = _kernels(input.device)
        self.classes = _multiple(linear_weight.shape[0])
        self.all_in_8_bits = chunking.products == "fp8"
        super().__init__(rows, input, linear_weight, linear_bias, chunking, *gradient_args)
        number, features = rows.number, linear_weight.shape[1]
        self.block = self._rows_of_block(number)
        largest = _largest(linear_weight)
        self.scale_of_weight = reference_fp8.scale_of(largest)
        self.scale_of_gradient = largest.new_full((), 1 / LARGEST)
        head = self._memory(self.all_in_8_bits, self.mask[0])
        self.head8 = head[0].view(self.classes, features) if self.all_in_8_bits else None
        self.head8_t = head[1].view(features, self.classes) if self.mask[0] else None
        self.fp8.quantize(linear_weight, self.scale_of_weight, None, self.head8, self.head8_t)
        if self.all_in_8_bits:
            largest = _largest(input)
            self.scale_of_input = reference_fp8.scale_of(largest)
            self.input8 = input.new_empty(input.shape, dtype=DTYPE)
            self.fp8.quantize(input, self.scale_of_input, None, self.input8)
        if self.mask[0]:
            self.gradient8 = input.new_empty((self.size, self.classes), dtype=DTYPE)
        if self.mask[1] or self.mask[2]:
            self.gradient8_t = input.new_empty((self.classes, _multiple(self.block)), dtype=DTYPE)
            self.bounds = input.new_empty(_multiple(self.block), dtype=torch.float32)

    def _gradient_memory(self, shape: tuple[int, int], sum_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape_with_copies = (max(shape[0], self.classes), shape[1])  # room for two 8-bit copies of the weight
        weight, bias = head_gradients(self.all_input, shape_with_copies, self.mask[1:], sum_dtype)
        return weight[: shape[0]] if self.mask[1] else weight, bias[: shape[0]]

    def _memory(self, *copies: bool) -> list[Tensor]:
        """Memory for 8-bit copies of the weight; empty if they are not wanted."""
        number = self.classes * self.head.shape[1]
        if self.mask[1] and self.block >= self.rows.number:
            base = self.padded_weight
            padded = base.as_strided((max(base.shape[0], self.classes), base.shape[1]), base.stride())
            memory = padded.view(DTYPE).view(-1)
        else:
            memory = self.all_input.new_empty(number * sum(copies), dtype=DTYPE)
        starts = [number * sum(copies[:i]) for i in range(len(copies))]
        return [memory[start : start + number * is_wanted] for start, is_wanted in zip(starts, copies, strict=True)]

    def _rows_of_chunk(self, number: int, classes: int, wider: bool, chunk_rows: int | None) -> int:
        """As many rows as fit into _CHUNK_BYTES with their logits and gradient."""
        if chunk_rows is not None:
            return min(max(number, 1), chunk_rows, _MOST_ROWS)
        most = min(_CHUNK_BYTES // (classes * (self.all_input.element_size() + 1)), _MOST_ROWS)
        step = _STEP if most >= _STEP else MULTIPLE
        return evenly(max(number, 1), max(most // step * step, MULTIPLE))

    def _rows_of_block(self, number: int) -> int:
        """A multiple of the rows of a chunk."""
        if number * self.classes <= _BLOCK_BYTES:
            return max(number, 1)
        return max(_PART_BYTES // self.classes // self.size, 1) * self.size

    def _columns(self) -> int:
        return self.classes

    def _write_logits(self, chunk: slice, logits: Tensor) -> None:
        self.chunk = chunk
        if self.head8 is None:
            super()._write_logits(chunk, logits)
            return
        part = self.rows.select(self.input8.view(torch.uint8), chunk).view(DTYPE)
        padded = logits.as_strided((logits.shape[0], self.classes), logits.stride())  # the memory has room for them
        self.fp8.product(part, self.head8, self.scale_of_input, self.scale_of_weight, padded)
        if self.head_bias is not None:
            logits.add_(self.head_bias)

    def write(self, name: str, **arguments: Any) -> tuple[Tensor, ...]:
        """Store the gradient in both layouts, not over the logits, and add up its products at once."""
        arguments = as_record(arguments)
        if name == "cross_entropy_with_grad":
            row_operator = reference_with_grad.cross_entropy_with_grad
            return *row_operator(**arguments, forward=_forward, backward=self._backward), arguments["logits"]
        self._backward(**arguments)
        return (arguments["logits"],)

    def _backward(
        self,
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        weight: Tensor | None,
        *other_args: Any,
        options: RowOptions,
        **keywords: Any,
    ) -> None:
        """Arguments as for reference.cross_entropy_backward."""
        chunk = self.chunk
        start, stop = chunk.start, chunk.stop
        if start == stop:
            self.padded_weight.zero_()
            self.padded_bias.zero_()
            return
        place = start % self.block
        weight = None if weight is None else weight.to(lse.dtype).contiguous()
        row_args = (grad_loss, grad_lse, logits, target, lse, weight, *other_args)
        row_values = reference_fp8.gradient_rows(*row_args, options=options, first_row=start, **keywords)
        rows = self.gradient8[: stop - start] if self.mask[0] else None
        sums_head = self.mask[1] or self.mask[2]
        columns = self.gradient8_t[:, place : place + stop - start] if sums_head else None
        self.fp8.gradient(logits, row_values, weight, options, rows, columns)
        if rows is not None and self.head8_t is not None:
            direct = not isinstance(self.rows, PackedRows)
            out = self.input[chunk] if direct else self.input.new_empty((stop - start, self.head.shape[1]))
            self.fp8.product(rows, self.head8_t, self.scale_of_gradient, self.scale_of_weight, out)
            out.mul_(row_values.bound.unsqueeze(1))
            if isinstance(self.rows, PackedRows):
                self.input.index_copy_(0, self.rows.order[chunk], out)
        if sums_head:
            shares = None if self.shares is None else self.shares[chunk]
            self.bounds[place : place + stop - start] = (
                row_values.bound if shares is None else row_values.bound * shares
            )
            if stop == self.rows.number or stop % self.block == 0:
                self._add_block(start - place, stop)

    def _add_block(self, start: int, stop: int) -> None:
        """Add the products of these rows' gradient to the gradients of the weight and the bias."""
        number, first = stop - start, start == 0
        width, classes = _multiple(number), self.head.shape[0]
        gradient, bounds = self.gradient8_t[:classes, :width], self.bounds[:number]
        if width > number:
            self.gradient8_t.view(torch.uint8)[:, number:width].zero_()
        if self.mask[1]:
            input = self.rows.select(self.all_input, slice(start, stop))
            largest = torch.linalg.vector_norm(input, float("inf"), dim=1, dtype=torch.float32)
            scale = reference_fp8.scale_of((largest * bounds).amax())
            input8_t = input.new_empty((input.shape[1], width), dtype=DTYPE)
            self.fp8.quantize(input, scale, bounds, None, input8_t)
            self._add_product(gradient, input8_t, scale, first)
        if self.mask[2]:
            scale = reference_fp8.scale_of(bounds.amax())
            ones = bounds.new_empty((MULTIPLE, width), dtype=DTYPE)  # ones times the bounds of their rows
            self.fp8.quantize(bounds.unsqueeze(0), scale, None, ones)
            grad_bias = bounds.new_empty((classes, MULTIPLE))
            self.fp8.product(gradient, ones, self.scale_of_gradient, scale, grad_bias)
            self.bias.copy_(grad_bias[:, 0]) if first else self.bias.add_(grad_bias[:, 0])

    def _add_product(self, gradient: Tensor, input8_t: Tensor, scale: Tensor, first: bool) -> None:
        if first:  # from here on the weight's copies, which may share this memory, are not read
            self.fp8.product(gradient, input8_t, self.scale_of_gradient, scale, self.weight)
            zero_behind(self.padded_weight, self.padded_bias, self.weight.shape[0])
            return
        for part in range(0, self.weight.shape[0], _SLAB):  # so few classes are added while they are in the L2 cache
            slab = slice(part, part + _SLAB)
            added = torch.empty_like(self.weight[slab])
            self.fp8.product(gradient[slab], input8_t, self.scale_of_gradient, scale, added)
            self.weight[slab] += added

    def add(self, chunk: slice, logits: Tensor) -> None:
        """``write`` has added the products."""
