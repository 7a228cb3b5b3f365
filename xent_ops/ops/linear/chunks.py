"""Linear cross entropy by chunks of rows, on every device: three products by torch, the rows by our operators.

The logits of one chunk exist at a time, in memory that is allocated once a call:

    logits = input @ linear_weight.T + linear_bias
    loss, lse, and the gradient of the logits written over them
    grad_input = gradient @ linear_weight;  grad_linear_weight += gradient.T @ input;  grad_linear_bias += its sum

float16 has no numbers for a gradient that was divided by the number of rows: with 32768 rows and 128256 classes almost
all of it is zero. So the gradient of float16 logits is made for upstream gradients of about one, and the rest of the
factor is applied to the products, whose sum over chunks is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import reductions, reference
from ...kernels.options import DEFAULTS, LossOptions, Options
from .sizes import rows_of_chunk

_ops = torch.ops.xent

Gradients = tuple[Tensor, Tensor, Tensor]  # of input, linear_weight, linear_bias


def accumulator_of_weight(dtype: torch.dtype, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which the chunks' parts of grad_linear_weight are added up."""
    return accumulate_dtype or (torch.float32 if dtype == torch.float16 else dtype)


def _as_rows(input: Tensor) -> Tensor:
    return input.reshape(math.prod(input.shape[:-1]), input.shape[-1])


def _chunks(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, chunk_rows: int | None, wider: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    """(which rows of input (N, H), their logits, which may be overwritten). Without rows one empty chunk.

    ``wider``: as in sizes.py.
    """
    number, classes = input.shape[0], linear_weight.shape[0]
    size = rows_of_chunk(input, linear_weight, wider, chunk_rows)
    # Rows start at multiples of 16 bytes, as cuBLAS wants them for its fast products.
    step = 16 // input.element_size()
    memory = input.new_empty((size, -(-classes // step) * step))[:, :classes]
    for start in range(0, max(number, 1), size):
        rows = slice(start, min(start + size, number))
        logits = memory[: rows.stop - start]
        if linear_bias is None:
            torch.mm(input[rows], linear_weight.t(), out=logits)
        else:
            torch.addmm(linear_bias, input[rows], linear_weight.t(), out=logits)
        yield rows, logits


class _Products:
    """Turns the gradients of chunks of logits into those of input, linear_weight and linear_bias."""

    def __init__(
        self, input: Tensor, linear_weight: Tensor, output_mask: Sequence[bool], accumulate_dtype: torch.dtype | None
    ) -> None:
        self.rows, self.head = input, linear_weight
        shape, sums = linear_weight.shape, accumulator_of_weight(input.dtype, accumulate_dtype)
        self.input = input.new_empty(input.shape if output_mask[0] else 0)
        self.weight = input.new_empty(shape if output_mask[1] else 0, dtype=sums)
        self.bias = input.new_zeros(shape[:1] if output_mask[2] else 0, dtype=reference.accumulator(input))
        self.mask = output_mask
        self.wider = output_mask[1] and sums != input.dtype

    def add(self, rows: slice, gradient: Tensor) -> None:
        if self.mask[0]:
            torch.mm(gradient, self.head, out=self.input[rows])
        if self.mask[1]:
            _add_product(self.weight, gradient.t(), self.rows[rows], rows.start == 0)
        if self.mask[2]:
            self.bias += gradient.sum(0, dtype=self.bias.dtype)

    def grad_input(self, input: Tensor) -> Tensor:
        return self.input.view(input.shape) if self.mask[0] else self.input


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right, which ``first`` starts from zero."""
    if total.dtype == left.dtype:
        torch.mm(left, right, out=total) if first else torch.addmm(total, left, right, out=total)
    elif total.device.type == "cuda":
        if first:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        _add_product(total, left.to(total.dtype), right.to(total.dtype), first)


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """grad times factor, ()."""
    grad = grad.clone(memory_format=torch.contiguous_format)
    _ops.scale_grad_(grad, factor)
    return grad


def forward(operator: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """The forward of ``operator``, one of those that take logits, by chunks."""

    def by_chunks(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        options: Options = DEFAULTS,
        accumulate_dtype: torch.dtype | None = None,  # for the backward
        chunk_rows: int | None = None,
    ) -> tuple[Tensor, ...]:
        flat, indices, keywords = _as_rows(input), target.reshape(-1), options.keywords()
        made = [
            operator(logits, indices[rows], weight, **keywords)
            for rows, logits in _chunks(flat, linear_weight, linear_bias, chunk_rows)
        ]
        return tuple(torch.cat(chunks).view(target.shape) for chunks in zip(*made, strict=True))

    return by_chunks


def _largest(
    target: Tensor, weight: Tensor | None, classes: int, options: Options, grad_loss: Any, *grads: Tensor | None
) -> Tensor:
    """What to divide upstream gradients by, (), so that none is above one, with its class weights."""
    masses = reductions.target_weights(target, weight, classes, options.ignore_index, grad_loss.dtype)
    if weight is not None and options.label_smoothing > 0.0:
        masses = masses.abs() + weight.to(masses.dtype).abs().mean()
    counted = target.to(torch.int64) != options.ignore_index
    rows = [torch.where(counted, grad_loss, 0.0) * masses, *(grad for grad in grads if grad is not None)]
    largest = torch.cat([grad_loss.new_zeros(1), *rows]).abs().max()
    return _divisible(largest)


def _divisible(number: Tensor) -> Tensor:
    """The number, or one where nothing can be divided by it."""
    return torch.where((number != 0.0) & number.isfinite(), number, 1.0)


def linear_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Gradients:
    """Makes the logits again. Gradients in the inputs' dtype; (0,) where the mask does not want one."""
    upstream = reference.row_grads(
        grad_loss, grad_lse, target, lse, divisor, options.ignore_index, lse_square_scale, lse.dtype
    )
    factor = None
    rows_of = [
        None if value is None else value.reshape(-1) for value in (*upstream, grad_entropy, target, lse, entropy)
    ]
    if input.dtype == torch.float16:
        factor = _largest(target.reshape(-1), weight, linear_weight.shape[0], options, *rows_of[:3])
        rows_of[:3] = [None if value is None else value / factor for value in rows_of[:3]]
    flat, keywords = _as_rows(input), options.keywords()
    products = _Products(flat, linear_weight, output_mask, accumulate_dtype)
    for rows, logits in _chunks(flat, linear_weight, linear_bias, chunk_rows, products.wider):
        a, b, c, indices, z, h = [None if value is None else value[rows] for value in rows_of]
        if h is None:
            _ops.cross_entropy_backward_(a, b, logits, indices, z, weight, **keywords)
            products.add(rows, logits)
        else:
            products.add(rows, _ops.cross_entropy_backward_entropy(a, b, c, logits, indices, z, h, weight, **keywords))
    if factor is not None:
        for gradient in (products.input, products.weight, products.bias):
            _ops.scale_grad_(gradient, factor)
    return products.grad_input(input), products.weight.to(input.dtype), products.bias.to(input.dtype)


def divided_by(
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    classes: int,
    dtype: torch.dtype,
    loss: LossOptions,
) -> Tensor:
    """(2,): what a reduced loss and its z-loss are divided by."""
    ignore_index = loss.rows.ignore_index
    if loss.reduction == "mean":
        return reductions.divisor_of(
            reductions.target_weights(target, weight, classes, ignore_index, dtype), target, ignore_index
        )
    if divisor is None:
        return target.new_ones(2, dtype=dtype)
    return divisor.to(dtype).expand(2).contiguous()


def divisor_after_products(divided_by: Tensor) -> Tensor:
    """(): what float16 gradients are divided by after the products: the number of counted rows, or the divisor.

    Not the sum of their class weights, which may be far from one. Zero and infinity are divided by at once.
    """
    return _divisible(divided_by[1])


def linear_cross_entropy_with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> tuple[Tensor, ...]:
    """(value, divided_by, lse, gradients). The gradients of the weight and the bias are as they were added up.

    They are those of value; for float16 those of value * divisor_after_products(divided_by).
    """
    loss = LossOptions(options, lse_square_scale, reduction)
    divisors = divided_by(target, weight, divisor, linear_weight.shape[0], reference.accumulator(input), loss)
    inverse = divisors.reciprocal()
    if input.dtype == torch.float16:
        inverse = inverse * divisor_after_products(divisors)
    scale, square = inverse[0], None
    if lse_square_scale != 0.0:
        square = lse_square_scale * inverse[1]
    flat, indices, keywords = _as_rows(input), target.reshape(-1), options.keywords()
    products, made = _Products(flat, linear_weight, output_mask, accumulate_dtype), []
    for rows, logits in _chunks(flat, linear_weight, linear_bias, chunk_rows, products.wider):
        made.append(_ops.cross_entropy_with_grad_(logits, indices[rows], scale, square, weight, **keywords))
        products.add(rows, logits)
    row_loss, lse = (torch.cat(chunks).view(target.shape) for chunks in zip(*made, strict=True))
    value = reductions.reduce_rows(row_loss, lse, target, divisors, loss._replace(reduction="mean")).value
    return value, divisors, lse, products.grad_input(input), products.weight, products.bias
