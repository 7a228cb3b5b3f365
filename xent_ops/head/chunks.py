"""Linear cross entropy by chunks of rows, on every device: three products by torch, the rows by our operators.

The logits of one chunk exist at a time, in memory that is allocated once a call:

    logits = input @ linear_weight.T + linear_bias
    their statistics, or the gradient of the logits written over them, or both in one visit
    grad_input = gradient @ linear_weight;  grad_linear_weight += gradient.T @ input;  grad_linear_bias += its sum

Gradients are those of a slice of the classes too: a whole vocabulary is the slice from 0 on, of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reductions, reference
from ..kernels.options import DEFAULTS, Chunking, LossOptions, Options
from . import float16
from .packing import ComputedRows
from .products import products, rows_to_compute

_ops = torch.ops.xent

# loss, lse, argmax and entropy of an ignored row that was skipped
_UNREAD = (0.0, math.inf, -1, 0.0)

Gradients = tuple[Tensor, Tensor, Tensor]  # of input, linear_weight, linear_bias


def as_rows(input: Tensor) -> Tensor:
    return input.reshape(math.prod(input.shape[:-1]), input.shape[-1])


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """grad times factor, ()."""
    grad = grad.clone(memory_format=torch.contiguous_format)
    _ops.scale_grad_(grad, factor)
    return grad


def statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # for the backward
    **chunking: Any,
) -> tuple[Tensor, ...]:
    """(loss, lse, argmax, entropy), (0,) where they are not wanted."""
    flat, keywords, how = as_rows(input), options.keywords(), Chunking(**chunking)
    rows = rows_to_compute(target, flat, linear_weight, options, how)
    head, indices = products(rows, flat, linear_weight, linear_bias, how), rows.indices()
    made = [
        _ops.cross_entropy_forward(logits, indices[chunk], weight, with_argmax, with_entropy, **keywords)
        for chunk, logits in head.chunks()
    ]
    wanted = (True, True, with_argmax, with_entropy)
    values = _of_rows(rows, target, made, wanted)
    # Those that are computed nevertheless, where nothing skips them.
    return tuple(without_ignored(values, wanted, target, options) if how.skip_ignored else values)


def without_ignored(values: Sequence[Tensor], wanted: Sequence[bool], target: Tensor, options: Options) -> list[Tensor]:
    """(loss, lse, argmax, entropy), in ignored rows as of rows that were skipped."""
    ignored = ~reference.is_counted(target, options.ignore_index)
    return [
        value.masked_fill(ignored, unread) if want else value
        for value, want, unread in zip(values, wanted, _UNREAD, strict=True)
    ]


def _of_rows(rows: ComputedRows, target: Tensor, made: list[Any], wanted: Sequence[bool]) -> list[Tensor]:
    """(loss, lse, argmax, entropy), each of the target's shape, of those of chunks; (0,) where they are not wanted."""
    return [
        rows.give(torch.cat(chunks), unread).view(target.shape) if want else chunks[0]
        for chunks, want, unread in zip(zip(*made, strict=True), wanted, _UNREAD, strict=True)
    ]


def gradients(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisors: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    coefficient: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> Gradients:
    """Makes the logits again. Gradients in the inputs' dtype; (0,) where the mask does not want one.

    Of a slice of the classes grad_input is its part of a sum.
    """
    flat, how = as_rows(input), Chunking(**chunking)
    head, bias, weight, padding = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    if head.shape[0] == 0:
        shapes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
        zeros = [input.new_zeros(shape if made else 0) for shape, made in zip(shapes, output_mask, strict=True)]
        return zeros[0], zeros[1], zeros[2]
    upstream = reference.row_grads(
        grad_loss, grad_lse, target, lse, divisors, options.ignore_index, lse_square_scale, lse.dtype
    )
    rows = rows_to_compute(target, flat, head, options, how)
    indices = rows.indices()
    of_rows = [None if value is None else rows.take_grads(value) for value in (*upstream, grad_entropy)]
    of_rows += [None if value is None else rows.take(value) for value in (lse, entropy, coefficient)]
    factor = None
    if input.dtype == torch.float16:
        factor = float16.largest(indices, weight, of_rows[5], head.shape[0], options, *of_rows[:3])
        of_rows[:3] = [None if value is None else value / factor for value in of_rows[:3]]
    made = products(rows, flat, head, bias, how, output_mask, accumulate_dtype, padding)
    for chunk, logits in made.chunks():
        a, b, c, z, h, coefficients = [None if value is None else value[chunk] for value in of_rows]
        assert a is not None and z is not None
        of_slice = (class_start, num_classes, options)
        made.backward(chunk, a, b, logits, indices[chunk], z, weight, c, h, coefficients, *of_slice)
    sums = (made.input, made.padded_weight, made.padded_bias)
    if factor is not None:
        for gradient in sums:
            _ops.scale_grad_(gradient, factor)
    return (
        sums[0].view(input.shape if output_mask[0] else 0),
        sums[1].to(input.dtype),
        sums[2].to(input.dtype),
    )


def classes_of(
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    class_start: int,
    num_classes: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """The three without the rows behind the last class, and how many these are."""
    if num_classes is None:
        return linear_weight, linear_bias, weight, 0
    columns = reference.columns_of(linear_weight.shape[0], class_start, num_classes)
    bias, class_weight = (None if tensor is None else tensor[:columns] for tensor in (linear_bias, weight))
    return linear_weight[:columns], bias, class_weight, linear_weight.shape[0] - columns


def divided_by(
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    classes: int,
    dtype: torch.dtype,
    loss: LossOptions,
    token_weight: Tensor | None = None,
) -> Tensor:
    """(2,): what a reduced loss and its z-loss are divided by."""
    ignore_index = loss.rows.ignore_index
    if loss.reduction == "mean":
        weights = reductions.target_weights(target, weight, classes, ignore_index, dtype)
        return reductions.divisor_of(weights, target, ignore_index, token_weight)
    if divisor is None:
        return target.new_ones(2, dtype=dtype)
    return divisor.to(dtype).expand(2).contiguous()


def factors(inverse: Tensor, token_weight: Tensor | None, lse_square_scale: float) -> tuple[Tensor, Tensor | None]:
    """Of the gradients of losses and squares of lse: (), or one a row. ``inverse``: of the divisors, (2,)."""
    both = inverse if token_weight is None else inverse.unsqueeze(-1) * token_weight
    return both[0], None if lse_square_scale == 0.0 else lse_square_scale * both[1]


def with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    token_weight: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    **chunking: Any,
) -> tuple[Tensor, ...]:
    """(value, divided_by, loss, lse, argmax, entropy, gradients), the last but three of rows.

    argmax and entropy are (0,) where they are not wanted. The gradients of the weight and the bias are as they were
    added up. They are those of value; for float16 those of value times what split_divisors divides by later.
    """
    loss, dtype = LossOptions(options, lse_square_scale, reduction), reference.accumulator(input)
    divisors = divided_by(target, weight, divisor, linear_weight.shape[0], dtype, loss, token_weight)
    within, _ = float16.split_divisors(
        input.dtype, divisors, target, token_weight, weight, linear_weight.shape[0], loss
    )
    inverse = within.reciprocal()
    flat, how, made = as_rows(input), Chunking(**chunking), []
    rows = rows_to_compute(target, flat, linear_weight, options, how)
    of_rows = None if token_weight is None else rows.take(token_weight.to(dtype))
    head, indices = products(rows, flat, linear_weight, linear_bias, how, output_mask, accumulate_dtype), rows.indices()
    for chunk, logits in head.chunks():
        scales = factors(inverse, None if of_rows is None else of_rows[chunk], lse_square_scale)
        of_chunk = (indices[chunk], *scales, weight, with_argmax, with_entropy, options)
        made.append(head.with_grad(chunk, logits, *of_chunk))
    statistics = _of_rows(rows, target, made, (True, True, with_argmax, with_entropy))
    mean = loss._replace(reduction="mean")
    row_loss, lse, *_ = statistics
    value = reductions.reduce_rows(row_loss, lse, target, divisors, mean, token_weight).value
    return (
        value,
        divisors,
        *statistics,
        head.input.view(input.shape if output_mask[0] else 0),
        head.weight,
        head.bias,
    )
