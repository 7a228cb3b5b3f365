"""Several classes a row, ``ids`` (..., K): x of each, lse and entropy, of given logits and of a head's by chunks.

The row operators serve the lse and the entropy, with the row's first counted id for its target; plain torch serves the
ids: kernels/reference_ids.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference, reference_ids
from ..kernels.options import DEFAULTS, Chunking, Options
from ..kernels.rows import front_of
from . import float16
from .chunks import Gradients, as_rows
from .products import Products, rows_to_compute

_ops = torch.ops.xent


def statistics_of_rows(
    logits: Tensor, ids: Tensor, with_entropy: bool = False, *, options: Options = DEFAULTS
) -> tuple[Tensor, Tensor, Tensor]:
    """(x of the ids (..., K), lse (...), entropy (...) or (0,)) of logits (..., V)."""
    target = reference_ids.first_counted(ids, options.ignore_index)
    _, lse, _, entropy = _ops.cross_entropy_forward(logits, target, None, False, with_entropy, **options.keywords())
    return reference_ids.gather(logits, ids, 0, None, options), lse, entropy


def gradient(
    grad_ids: Tensor,  # (..., K)
    grad_lse: Tensor | None,  # (...)
    grad_entropy: Tensor | None,
    logits: Tensor,  # (..., columns)
    ids: Tensor,
    at_ids: Tensor,
    lse: Tensor,
    entropy: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    class_start: int = 0,
    num_classes: int | None = None,
    grad_dtype: torch.dtype | None = None,
    in_place: bool = False,
    out_of_place: bool = False,
) -> Tensor:
    """(..., columns). ``in_place``: over the logits, in grad_dtype; ``out_of_place``: over nothing, for exporters."""
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)
    grad_lse = torch.where(at_ids.isnan().any(-1), float("nan"), grad_lse)  # that of an id that is no class, too
    target, keywords = reference_ids.first_counted(ids, options.ignore_index), options.keywords()
    of_slice = (None, None, grad_entropy, entropy, None, class_start, num_classes, grad_dtype)
    given = (lse.new_zeros(()), grad_lse, logits, target, lse, *of_slice)
    if in_place:
        _ops.cross_entropy_backward_(*given, **keywords)
        made = front_of(logits, grad_dtype)
    else:
        made = _ops.cross_entropy_backward(*given, **keywords)
    rest = (ids, at_ids, grad_ids, grad_lse, lse, grad_entropy, entropy, class_start, num_classes)
    if out_of_place:
        return reference_ids.ids_grad(made, *rest, options=options)
    _ops.ids_grad_(made, *rest, **keywords)
    return made


def statistics(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None = None,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # for the backward
    **chunking: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x of the ids (..., K), lse (...), entropy (...) or (0,)) of a head's logits."""
    flat, how, target = as_rows(input), Chunking(**chunking), reference_ids.first_counted(ids, options.ignore_index)
    rows = rows_to_compute(target, flat, linear_weight, options, how)
    products, places = Products(rows, flat, linear_weight, linear_bias, how), rows.take_rows(ids)
    made = [
        statistics_of_rows(logits, places[chunk], with_entropy, options=options) for chunk, logits in products.chunks()
    ]
    at_ids, lse, entropy = (torch.cat(chunks) for chunks in zip(*made, strict=True))
    return (
        rows.give_rows(at_ids, 0.0).view(ids.shape),
        rows.give(lse, float("inf")).view(target.shape),
        rows.give(entropy, 0.0).view(target.shape) if with_entropy else entropy,
    )


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
    """Makes the logits again. In the inputs' dtype; (0,) where the mask does not want one."""
    flat, how, target = as_rows(input), Chunking(**chunking), reference_ids.first_counted(ids, options.ignore_index)
    rows = rows_to_compute(target, flat, linear_weight, options, how)
    places, upstream, x = (rows.take_rows(value) for value in (ids, grad_ids.to(lse.dtype), at_ids))
    of_rows = [None if value is None else rows.take_grads(value) for value in (grad_lse, grad_entropy)]
    of_rows += [None if value is None else rows.take(value) for value in (lse, entropy)]
    factor = None
    if input.dtype == torch.float16:
        magnitudes = (upstream.abs().amax(-1), of_rows[0], of_rows[1])
        factor = float16.largest(rows.indices(), None, None, linear_weight.shape[0], options, *magnitudes)
        upstream = upstream / factor
        of_rows[:2] = [None if value is None else value / factor for value in of_rows[:2]]
    products = Products(rows, flat, linear_weight, linear_bias, how, output_mask, accumulate_dtype)
    for chunk, logits in products.chunks():
        b, c, z, h = (None if value is None else value[chunk] for value in of_rows)
        assert z is not None
        given = (upstream[chunk], b, c, logits, places[chunk], x[chunk], z, h)
        gradient(*given, options=options, grad_dtype=products.grad_dtype, in_place=True)
        products.add(chunk, logits)
    made = (products.input, products.padded_weight, products.padded_bias)
    if factor is not None:
        for of_input in made:
            _ops.scale_grad_(of_input, factor)
    return (
        made[0].view(input.shape if output_mask[0] else 0),
        made[1].to(input.dtype),
        made[2].to(input.dtype),
    )


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
    """(x of the ids, lse, the gradients as they were added up).

    The gradients are those of the sum of grad_log_probs * log_probs and of grad_lse_square * lse^2, over counted rows.
    """
    flat, how, keywords = as_rows(input), Chunking(**chunking), options.keywords()
    target = reference_ids.first_counted(ids, options.ignore_index)
    rows = rows_to_compute(target, flat, linear_weight, options, how)
    upstream = torch.where(reference.is_counted(ids, options.ignore_index), grad_log_probs, 0.0)
    places, indices, upstream = rows.take_rows(ids), rows.indices(), rows.take_rows(upstream)
    mass, square = -upstream.sum(-1), None if grad_lse_square is None else rows.take(grad_lse_square)
    products = Products(rows, flat, linear_weight, linear_bias, how, output_mask, accumulate_dtype)
    made = []
    for chunk, logits in products.chunks():
        at_ids = reference_ids.gather(logits, places[chunk], 0, None, options)
        of_chunk = None if square is None else square[chunk]
        # The kernel takes the first id for the target, whose column is written again with those of the others.
        scale = torch.where(at_ids.isnan().any(-1), float("nan"), mass[chunk])
        more = (None, False, False, products.grad_dtype)
        _, lse, *_ = _ops.cross_entropy_with_grad_(logits, indices[chunk], scale, of_chunk, *more, **keywords)
        of_square = reference.grad_lse_of_square(of_chunk, lse, indices[chunk], options.ignore_index)
        total = scale if of_square is None else scale + of_square
        made_before = front_of(logits, products.grad_dtype)
        _ops.ids_grad_(made_before, places[chunk], at_ids, upstream[chunk], total, lse, **keywords)
        products.add(chunk, logits)
        made.append((at_ids, lse))
    at_ids, lse = (torch.cat(chunks) for chunks in zip(*made, strict=True))
    return (
        rows.give_rows(at_ids, 0.0).view(ids.shape),
        rows.give(lse, float("inf")).view(target.shape),
        products.input.view(input.shape if output_mask[0] else 0),
        products.weight,
        products.bias,
    )
