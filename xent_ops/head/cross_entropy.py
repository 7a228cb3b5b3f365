"""Class indices: what the operators of linear cross entropy compute, by chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reductions, reference
from ..kernels.options import DEFAULTS, Chunking, LossOptions, Options
from . import float16
from .chunks import Gradients, as_rows, classes_of, divided_by, factors, give, in_dtype, unread
from .way import IN_MEMORY, Way

_ops = torch.ops.xent


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
    way: Way = IN_MEMORY,
    **chunking: Any,
) -> tuple[Tensor, ...]:
    """(loss, lse, argmax, entropy), (0,) where they are not wanted."""
    flat, keywords, how = as_rows(input), options.keywords(), Chunking(**chunking)
    rows = way.rows(target, options.ignore_index, how, (flat, linear_weight))

    def visit(logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        return _ops.cross_entropy_forward(logits, target, weight, with_argmax, with_entropy, **keywords)

    made = way.products(rows, flat, linear_weight, linear_bias, how).run(visit, rows.indices())
    skipped = options.ignore_index if how.skip_ignored else None
    return tuple(give(rows, made, unread(with_argmax, with_entropy), target, skipped))


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
    way: Way = IN_MEMORY,
    **chunking: Any,
) -> Gradients:
    """Makes the logits again. Gradients in the inputs' dtype; (0,) where the mask does not want one.

    Of a slice of the classes grad_input is its part of a sum.
    """
    flat, keywords, how = as_rows(input), options.keywords(), Chunking(**chunking)
    head, bias, weight, padding = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    if head.shape[0] == 0:
        shapes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
        zeros = [input.new_zeros(shape if made else 0) for shape, made in zip(shapes, output_mask, strict=True)]
        return zeros[0], zeros[1], zeros[2]
    upstream = reference.row_grads(
        grad_loss, grad_lse, target, lse, divisors, options.ignore_index, lse_square_scale, lse.dtype
    )
    rows = way.rows(target, options.ignore_index, how, (flat, head))
    indices = rows.indices()
    grads = [None if value is None else rows.take_grads(value) for value in (*upstream, grad_entropy)]
    lses, entropies, coefficients = (
        None if value is None else rows.take(value) for value in (lse, entropy, coefficient)
    )
    split = (input.dtype, grads, indices, head.shape[0], options, weight, coefficients)
    factor, grads_of_rows = float16.split_grads(*split)
    products = way.products(rows, flat, head, bias, how, output_mask, accumulate_dtype, padding)
    of_slice = (class_start, num_classes, products.grad_dtype)

    def visit(
        logits: Tensor,
        target: Tensor,
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        lse: Tensor,
        entropy: Tensor | None,
        coefficient: Tensor | None,
    ) -> Sequence[Tensor]:
        of_entropy = (grad_entropy, entropy, coefficient)
        backward = (grad_loss, grad_lse, logits, target, lse, weight, None, *of_entropy, *of_slice)
        return products.write("cross_entropy_backward", logits, *backward, **keywords)

    if any(output_mask):
        products.run(visit, indices, *grads_of_rows, lses, entropies, coefficients, gradient=True)
    return in_dtype(products.gradients(input.shape, factor), input.dtype)


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
    way: Way = IN_MEMORY,
    **chunking: Any,
) -> tuple[Tensor, ...]:
    """(value, divisors, loss, lse, argmax, entropy, gradients), the last but three of rows.

    argmax and entropy are (0,) where they are not wanted. The gradients of the weight and the bias are as they were
    added up. They are those of value; for float16 those of value times what split_divisors divides by later.
    """
    loss, dtype = LossOptions(options, lse_square_scale, reduction), reference.accumulator(input)
    divisors = divided_by(target, weight, divisor, linear_weight.shape[0], dtype, loss, token_weight)
    within, _ = float16.split_divisors(
        input.dtype, divisors, target, token_weight, weight, linear_weight.shape[0], loss
    )
    inverse = within.reciprocal()
    flat, keywords, how = as_rows(input), options.keywords(), Chunking(**chunking)
    rows = way.rows(target, options.ignore_index, how, (flat, linear_weight))
    weights = None if token_weight is None else rows.take(token_weight.to(dtype))
    products = way.products(rows, flat, linear_weight, linear_bias, how, output_mask, accumulate_dtype)
    rest = (weight, with_argmax, with_entropy, products.grad_dtype)

    def visit(logits: Tensor, target: Tensor, token_weight: Tensor | None) -> Sequence[Tensor]:
        scales = factors(inverse, token_weight, lse_square_scale)
        return products.write("cross_entropy_with_grad", logits, logits, target, *scales, *rest, **keywords)

    made = products.run(visit, rows.indices(), weights, gradient=True)
    statistics = give(rows, made, unread(with_argmax, with_entropy), target, None)
    row_loss, lse, *_ = statistics
    value = reductions.reduce_rows(row_loss, lse, target, divisors, loss._replace(reduction="mean"), token_weight).value
    return value, divisors, *statistics, *products.gradients(input.shape)
