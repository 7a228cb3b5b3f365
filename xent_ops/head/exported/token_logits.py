"""Several classes a row: the operators of ids.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import reference, reference_ids
from ...kernels.options import DEFAULTS, Chunking, Options
from .. import float16
from .. import ids as of_ids
from ..chunks import Gradients, as_rows
from .loop import Loop, times


def statistics(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None = None,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> tuple[Tensor, ...]:
    how, rows = Chunking(**chunking), ids.shape[:-1]

    def of_rows(logits: Tensor, places: Tensor) -> Sequence[Tensor]:
        return of_ids.statistics_of_rows(logits, places, with_entropy, options=options)

    flat = ids.reshape(math.prod(rows), ids.shape[-1])
    at_ids, lse, entropy = Loop(as_rows(input), linear_weight, linear_bias, how)(of_rows, flat)
    if how.skip_ignored:
        ignored = ~reference.is_counted(ids, options.ignore_index).any(-1).reshape(-1)
        at_ids, lse = at_ids.masked_fill(ignored.unsqueeze(-1), 0.0), lse.masked_fill(ignored, math.inf)
        entropy = entropy.masked_fill(ignored, 0.0) if with_entropy else entropy
    return at_ids.view(ids.shape), lse.view(rows), entropy.view(rows) if with_entropy else entropy


def gradients(
    grad_ids: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    at_ids: Tensor,
    lse: Tensor,
    linear_bias: Tensor | None = None,
    entropy: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> Gradients:
    shape = (math.prod(ids.shape[:-1]), ids.shape[-1])
    places, upstream, x = (value.reshape(shape) for value in (ids, grad_ids.to(lse.dtype), at_ids))
    values = (grad_lse, grad_entropy, lse, entropy)
    b, c, z, h = (None if value is None else value.reshape(-1) for value in values)
    factor = None
    if input.dtype == torch.float16:
        target = reference_ids.first_counted(places, options.ignore_index)
        magnitudes = (upstream.abs().amax(-1), b, c)
        factor = float16.largest(target, None, None, linear_weight.shape[0], options, *magnitudes)
        upstream = upstream / factor
        b, c = (None if value is None else value / factor for value in (b, c))

    def of_rows(
        logits: Tensor, a: Tensor, ids: Tensor, x: Tensor, b: Any, c: Any, z: Tensor, h: Any
    ) -> Sequence[Tensor]:
        return (of_ids.gradient(a, b, c, logits, ids, x, z, h, options=options, out_of_place=True),)

    loop = Loop(as_rows(input), linear_weight, linear_bias, Chunking(**chunking), output_mask, accumulate_dtype)
    if any(output_mask):
        loop(of_rows, upstream, places, x, b, c, z, h)
    return times(loop.gradients(input.shape), factor, input.dtype)


def with_grad(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    grad_log_probs: Tensor,
    grad_lse_square: Tensor | None = None,
    linear_bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    *,
    options: Options = DEFAULTS,
    **chunking: Any,
) -> tuple[Tensor, ...]:
    shape, how = (math.prod(ids.shape[:-1]), ids.shape[-1]), Chunking(**chunking)
    upstream = torch.where(reference.is_counted(ids, options.ignore_index), grad_log_probs, 0.0).reshape(shape)
    squares = None if grad_lse_square is None else grad_lse_square.reshape(-1)

    def of_rows(logits: Tensor, places: Tensor, upstream: Tensor, square: Any) -> Sequence[Tensor]:
        at_ids, lse, _ = of_ids.statistics_of_rows(logits, places, options=options)
        target = reference_ids.first_counted(places, options.ignore_index)
        lse = reference.infinite_where_ignored(lse, target, options.ignore_index)
        of_square = reference.grad_lse_of_square(square, lse, target, options.ignore_index)
        total = -upstream.sum(-1) if of_square is None else of_square - upstream.sum(-1)
        given = (upstream, total, None, logits, places, at_ids, lse)
        return at_ids, lse, of_ids.gradient(*given, options=options, out_of_place=True)

    loop = Loop(as_rows(input), linear_weight, linear_bias, how, output_mask, accumulate_dtype)
    at_ids, lse = loop(of_rows, ids.reshape(shape), upstream, squares)[:2]
    return at_ids.view(ids.shape), lse.view(ids.shape[:-1]), *loop.gradients(input.shape)


def gradient_of_rows(*args: Any, **keywords: Any) -> Tensor:
    """Of given logits."""
    return of_ids.gradient(*args, out_of_place=True, **keywords)
