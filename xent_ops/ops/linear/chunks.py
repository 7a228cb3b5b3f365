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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import reductions, reference
from ...kernels.options import DEFAULTS, Chunking, LossOptions, Options
from .products import Products, rows_to_compute

_ops = torch.ops.xent

Gradients = tuple[Tensor, Tensor, Tensor]  # of input, linear_weight, linear_bias


def as_rows(input: Tensor) -> Tensor:
    return input.reshape(math.prod(input.shape[:-1]), input.shape[-1])


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """grad times factor, ()."""
    grad = grad.clone(memory_format=torch.contiguous_format)
    _ops.scale_grad_(grad, factor)
    return grad


def forward(operator: Callable[..., Any], *unread: float) -> Callable[..., tuple[Tensor, ...]]:
    """The forward of ``operator``, one of those that take logits, by chunks.

    ``unread``: what its outputs are in ignored rows that were skipped.
    """

    def by_chunks(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        options: Options = DEFAULTS,
        accumulate_dtype: torch.dtype | None = None,  # for the backward
        **chunking: Any,
    ) -> tuple[Tensor, ...]:
        flat, keywords, how = as_rows(input), options.keywords(), Chunking(**chunking)
        rows = rows_to_compute(target, flat, linear_weight, options, how)
        products, indices = Products(rows, flat, linear_weight, linear_bias, how.chunk_rows), rows.indices()
        made = [operator(logits, indices[chunk], weight, **keywords) for chunk, logits in products.chunks()]
        values = [rows.give(torch.cat(chunks), 0).view(target.shape) for chunks in zip(*made, strict=True)]
        if how.skips:
            ignored = ~reference.is_counted(target, options.ignore_index)
            values = [value.masked_fill(ignored, stands_for) for value, stands_for in zip(values, unread, strict=True)]
        return tuple(values)

    return by_chunks


def _largest(
    target: Tensor, weight: Tensor | None, classes: int, options: Options, grad_loss: Any, *grads: Tensor | None
) -> Tensor:
    """What to divide upstream gradients by, (), so that none is above one, with its class weights."""
    masses = reductions.target_weights(target, weight, classes, options.ignore_index, grad_loss.dtype)
    if weight is not None and options.label_smoothing > 0.0:
        masses = masses.abs() + weight.to(masses.dtype).abs().mean()
    counted = reference.is_counted(target, options.ignore_index)
    rows = [torch.where(counted, grad_loss, 0.0) * masses, *(grad for grad in grads if grad is not None)]
    largest = torch.cat([grad_loss.new_zeros(1), *rows]).abs().max()
    return divisible(largest)


def divisible(number: Tensor) -> Tensor:
    """The number, or one where nothing can be divided by it."""
    return torch.where((number != 0.0) & number.isfinite(), number, 1.0)


def _gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    lse: Tensor | None,
    entropy: Tensor | None,
    **options: Any,
) -> Tensor:
    """Written over the logits, where there is no entropy."""
    if entropy is None:
        _ops.cross_entropy_backward_(grad_loss, grad_lse, logits, target, lse, weight, **options)
        return logits
    rows = (logits, target, lse, entropy, weight)
    return _ops.cross_entropy_backward_entropy(grad_loss, grad_lse, grad_entropy, *rows, **options)


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
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    **chunking: Any,
) -> Gradients:
    """Makes the logits again. Gradients in the inputs' dtype; (0,) where the mask does not want one."""
    upstream = reference.row_grads(
        grad_loss, grad_lse, target, lse, divisor, options.ignore_index, lse_square_scale, lse.dtype
    )
    factor = None
    flat, keywords, how = as_rows(input), options.keywords(), Chunking(**chunking)
    rows = rows_to_compute(target, flat, linear_weight, options, how)
    indices = rows.indices()
    a, b, c, z, h = (None if value is None else rows.take(value) for value in (*upstream, grad_entropy, lse, entropy))
    if input.dtype == torch.float16:
        factor = _largest(indices, weight, linear_weight.shape[0], options, a, b, c)
        a, b, c = (None if value is None else value / factor for value in (a, b, c))
    products = Products(rows, flat, linear_weight, linear_bias, how.chunk_rows, output_mask, accumulate_dtype)
    for chunk, logits in products.chunks():
        given = [None if value is None else value[chunk] for value in (a, b, c, z, h)]
        products.add(chunk, _gradient(logits, indices[chunk], weight, *given, **keywords))
    if factor is not None:
        for gradient in (products.input, products.weight, products.bias):
            _ops.scale_grad_(gradient, factor)
    return (
        products.input.view(input.shape if output_mask[0] else 0),
        products.weight.to(input.dtype),
        products.bias.to(input.dtype),
    )


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
    return divisible(divided_by[1])


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
    **chunking: Any,
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
    flat, keywords, how, made = as_rows(input), options.keywords(), Chunking(**chunking), []
    rows = rows_to_compute(target, flat, linear_weight, options, how)
    products = Products(rows, flat, linear_weight, linear_bias, how.chunk_rows, output_mask, accumulate_dtype)
    indices = rows.indices()
    for chunk, logits in products.chunks():
        made.append(_ops.cross_entropy_with_grad_(logits, indices[chunk], scale, square, weight, **keywords))
        products.add(chunk, logits)
    losses, lses = (torch.cat(chunks) for chunks in zip(*made, strict=True))
    row_loss, lse = rows.give(losses, 0.0).view(target.shape), rows.give(lses, float("inf")).view(target.shape)
    value = reductions.reduce_rows(row_loss, lse, target, divisors, loss._replace(reduction="mean")).value
    return (
        value,
        divisors,
        lse,
        products.input.view(input.shape if output_mask[0] else 0),
        products.weight,
        products.bias,
    )
