"""Linear cross entropy with class indices, by chunks of rows. The linear operators call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.options import DEFAULTS, Chunking, LossOptions, RowOptions
from . import float16
from .backend import IN_MEMORY, Backend
from .chunks import (
    HeadGradients,
    as_rows,
    classes_of,
    divisors_and_factors,
    in_dtype,
    no_gradients,
    skipped_values,
    unpack_statistics,
)
from .ids import statistics_with_ids, token_logits_backward
from .sizes import without_gradients

_ops = torch.ops.xent


def linear_cross_entropy_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    ids: Tensor | None = None,
    mask_ids: bool = False,
    *,
    options: RowOptions = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # only the backward uses it
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> tuple[Tensor, ...]:
    """(loss, lse, argmax, entropy, lse_low, x of the ids): argmax, entropy and x (0,) if they are not wanted."""
    flat, keywords, chunking = as_rows(input), options.keywords(), Chunking(**fields)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, linear_weight))
    flags = (with_argmax, with_entropy, False, chunking.skip_ignored)
    if ids is None:
        chunking = without_gradients(chunking, rows.number, flat, linear_weight.shape[0])
    products = backend.products(rows, flat, linear_weight, linear_bias, chunking)

    def visit(logits: Tensor, target: Tensor, ids: Tensor | None) -> Sequence[Tensor]:
        if ids is not None:
            return statistics_with_ids(logits, target, ids, flags, mask_ids, options, products)
        return _ops.cross_entropy_forward(logits, target, weight, *flags, **keywords)

    computed = products.run(visit, rows.indices(), None if ids is None else rows.pack_classes(ids))
    if ids is None:
        computed.append(products.gradients(flat.shape)[2])  # its bias's (0,): a new one is one more operator call
    fills = (*skipped_values(with_argmax, with_entropy), 0.0, None if ids is None else 0.0)
    return tuple(unpack_statistics(rows, computed, fills, target, None))


def linear_cross_entropy_backward(
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
    lse_coefficient: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    lse_low: Tensor | None = None,
    ids: Tensor | None = None,
    at_ids: Tensor | None = None,
    grad_ids: Tensor | None = None,  # grad_loss is not read beside it
    mask_ids: bool = False,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    accumulate_dtype: torch.dtype | None = None,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> HeadGradients:
    """Compute the logits again. The gradients have the inputs' dtype, or are (0,) if the mask does not want them.

    For a slice of the classes, grad_input is the slice's part of a sum over slices.
    """
    flat, keywords, chunking = as_rows(input), options.keywords(), Chunking(**fields)
    head, bias, weight, padding = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    if head.shape[0] == 0:
        return no_gradients(input, linear_weight, output_mask)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, head))
    indices, statistics = rows.indices(), {"lse": lse, "lse_low": lse_low, "entropy": entropy}
    if ids is None:
        row_args = (target, lse, divisors, options.ignore_index, lse_square_scale, lse.dtype)
        grad_loss, grad_lse = reference.row_grads(grad_loss, grad_lse, *row_args)
        name, grad, classes = "grad_loss", rows.pack_grads(grad_loss), {"target": indices}
        statistics["lse_coefficient"] = lse_coefficient
    else:
        assert grad_ids is not None
        name, grad, classes = "grad_ids", rows.pack(grad_ids.to(lse.dtype)), {"ids": rows.pack_classes(ids)}
        statistics["at_ids"] = at_ids
    others = [None if tensor is None else rows.pack_grads(tensor) for tensor in (grad_lse, grad_entropy)]
    row_values = {key: None if tensor is None else rows.pack(tensor) for key, tensor in statistics.items()}
    coefficient = row_values.get("lse_coefficient")
    factors, row_grads = float16.split_grads(input.dtype, (grad, *others), indices, options, weight, coefficient)
    row_values |= {**dict(zip((name, "grad_lse", "grad_entropy"), row_grads, strict=True)), **classes}
    products = backend.products(rows, flat, head, bias, chunking, output_mask, accumulate_dtype, padding)
    slice_args = {"class_start": class_start, "num_classes": num_classes, "grad_dtype": products.grad_dtype}

    def visit(logits: Tensor, *values: Tensor | None) -> Sequence[Tensor]:
        row_args = {"logits": logits, **slice_args, **dict(zip(row_values, values, strict=True))}
        if ids is not None:
            return [token_logits_backward(**row_args, mask_ids=mask_ids, options=options, writer=products)]
        return products.write("cross_entropy_backward", weight=weight, **row_args, **keywords)

    if any(output_mask):
        shares = None if factors is None else factors.shares
        products.run(visit, *row_values.values(), gradient=True, shares=shares)
    return in_dtype(products.gradients(input.shape, factors), input.dtype)


def linear_cross_entropy_with_grad(
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
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> tuple[Tensor, ...]:
    """(value, divisors, z_loss, accuracy, loss, lse, argmax, entropy, gradients). The loss to the entropy: one per row.

    argmax and entropy are (0,) if they are not wanted; without argmax, z_loss and accuracy too. The gradients of the
    weight and the bias have the dtype in which they were added up. For float16 they lack the factors of
    ``float16.split_loss``.
    """
    loss = LossOptions(options, lse_square_scale, reduction)
    divisors, factors, shares = divisors_and_factors(input, target, weight, token_weight, divisor, loss)
    by_row = token_weight is not None or shares is not None
    flat, keywords, chunking = as_rows(input), options.keywords(), Chunking(**fields)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, linear_weight))
    row_factors = [rows.pack(one) if by_row and one is not None else None for one in factors]
    shares = None if shares is None else rows.pack(shares)
    products = backend.products(rows, flat, linear_weight, linear_bias, chunking, output_mask, accumulate_dtype)
    keywords |= {"weight": weight, "with_argmax": with_argmax, "with_entropy": with_entropy}
    keywords["grad_dtype"] = products.grad_dtype

    def visit(logits: Tensor, target: Tensor, *chunk_factors: Tensor | None) -> Sequence[Tensor]:
        scale, square = chunk_factors if by_row else factors
        row_args = {"logits": logits, "target": target, "grad_scale": scale, "grad_lse_square": square}
        return products.write("cross_entropy_with_grad", **row_args, **keywords)

    computed = products.run(visit, rows.indices(), *row_factors, gradient=True, shares=shares)
    statistics = unpack_statistics(rows, computed, skipped_values(with_argmax, with_entropy), target, None)
    row_loss, lse, argmax, _ = statistics
    summary_args = (row_loss, lse, target, None, token_weight, divisors, argmax if with_argmax else None)
    mean = loss._replace(reduction="mean").reduction_keywords()
    value, _, z_loss, accuracy = _ops.row_summary(*summary_args, **mean)
    return value, divisors, z_loss, accuracy, *statistics, *products.gradients(input.shape)
