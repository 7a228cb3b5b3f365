"""Cross entropy: the operators of chunks.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import reductions, reference
from ...kernels.options import DEFAULTS, Chunking, LossOptions, Options
from .. import chunks, float16
from ..chunks import Gradients, as_rows, classes_of
from .loop import Loop, times


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
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> tuple[Tensor, ...]:
    how, wanted = Chunking(**chunking), (True, True, with_argmax, with_entropy)

    def of_rows(logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        return reference.statistics(logits, target, weight, with_argmax, with_entropy, options=options)

    made = Loop(as_rows(input), linear_weight, linear_bias, how)(of_rows, target.reshape(-1))
    return tuple(_of_shape(made, target, wanted, how, options))


def _of_shape(
    made: Sequence[Tensor], target: Tensor, wanted: Sequence[bool], how: Chunking, options: Options
) -> list[Tensor]:
    values = [value.view(target.shape) if want else value for value, want in zip(made, wanted, strict=True)]
    return chunks.without_ignored(values, wanted, target, options) if how.skip_ignored else values


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
    head, bias, weight, padding = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    upstream = reference.row_grads(
        grad_loss, grad_lse, target, lse, divisors, options.ignore_index, lse_square_scale, lse.dtype
    )
    values = (*upstream, grad_entropy, lse, entropy, coefficient)
    a, b, c, z, h, coefficients = (None if value is None else value.reshape(-1) for value in values)
    indices, factor = target.reshape(-1), None
    if input.dtype == torch.float16:
        factor = float16.largest(indices, weight, coefficients, head.shape[0], options, a, b, c)
        a, b, c = (None if value is None else value / factor for value in (a, b, c))

    def of_rows(
        logits: Tensor, target: Tensor, a: Tensor, b: Any, c: Any, z: Tensor, h: Any, k: Any
    ) -> Sequence[Tensor]:
        rest = (weight, None, c, h, k, class_start, num_classes)
        return (reference.cross_entropy_backward(a, b, logits, target, z, *rest, options=options),)

    loop = Loop(as_rows(input), head, bias, Chunking(**chunking), output_mask, accumulate_dtype)
    if any(output_mask):
        loop(of_rows, indices, a, b, c, z, h, coefficients)
    return times(loop.gradients(input.shape, padding), factor, input.dtype)


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
    loss, dtype = LossOptions(options, lse_square_scale, reduction), reference.accumulator(input)
    divisors = chunks.divided_by(target, weight, divisor, linear_weight.shape[0], dtype, loss, token_weight)
    within, _ = float16.split_divisors(
        input.dtype, divisors, target, token_weight, weight, linear_weight.shape[0], loss
    )
    inverse = within.reciprocal()
    of_tokens = None if token_weight is None else token_weight.to(dtype).reshape(-1)
    flat, indices = as_rows(input), target.reshape(-1)
    factors = chunks.factors(inverse, of_tokens, lse_square_scale)
    scale, square = (None if factor is None else factor.expand(indices.shape) for factor in factors)

    def of_rows(logits: Tensor, target: Tensor, scale: Tensor, square: Any) -> Sequence[Tensor]:
        wanted = (with_argmax, with_entropy)
        return reference.cross_entropy_with_grad(logits, target, scale, square, weight, *wanted, options=options)

    how = Chunking(**chunking)
    loop = Loop(flat, linear_weight, linear_bias, how, output_mask, accumulate_dtype)
    made = loop(of_rows, indices, scale, square)[:4]
    statistics = _of_shape(made, target, (True, True, with_argmax, with_entropy), how, options)
    row_loss, lse, *_ = statistics
    value = reductions.reduce_rows(row_loss, lse, target, divisors, loss._replace(reduction="mean"), token_weight).value
    return value, divisors, *statistics, *loop.gradients(input.shape)
