"""What the operators of one chunk of rows compute for loop.py: ops/linear/chunk.py. Of a whole head, or of a slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference_ids
from ..kernels.options import DEFAULTS, RowOptions
from ..kernels.rows import first_columns, front_of, padded_classes
from .chunks import classes_of
from .float16 import times
from .ids import gradient
from .packing import part_of
from .products import (
    InPlace,
    add_product,
    add_rows,
    counting_kernels,
    gradient_in,
    logits_of,
    write_product,
    zero_behind,
)
from .shard import pack_statistics, rank_statistics, statistics_by_lse

_ops = torch.ops.xent


def chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int = 0,
    num_classes: int | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    with_entropy: bool = False,
    count: Tensor | None = None,
    after: Tensor | None = None,
    ids: Tensor | None = None,
    mask_ids: bool = False,
    logits_dtype: torch.dtype | None = None,
    *,
    options: RowOptions = DEFAULTS,
    padded: Callable[..., Tensor] | None = None,
    writer: InPlace = InPlace(),  # noqa: B008 (it has no state)
) -> tuple[Tensor, Tensor]:
    """(the packed statistics of this rank, the logits). Rows after the count may have logits of 0."""
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    logits = (padded or padded_logits)(input, head, bias, count, logits_dtype)
    columns, at_ids, keywords = head.shape[0], None, options.keywords()
    masked_ids = ids if mask_ids else None
    if masked_ids is not None:
        at_ids, logits = writer.mask_columns(logits, columns, masked_ids, (class_start, num_classes), options)
    class_logits = first_columns(logits, columns)
    if ids is not None and not mask_ids:
        at_ids = _ops.ids_forward(class_logits, ids, class_start, num_classes, **keywords)
    if num_classes is None:
        loss, lse, _, entropy, lse_low = _ops.cross_entropy_forward(
            class_logits, target, weight, False, with_entropy, **keywords
        )
        if masked_ids is not None:
            lse = reference_ids.lse_of_others(lse, masked_ids, columns, options=options)
        rows = [value.unsqueeze(0) for value in (loss, lse, lse_low)]
        rows += [entropy.unsqueeze(0)] if with_entropy else []
        return torch.cat(rows if at_ids is None else [*rows, at_ids.t()]), logits
    slice_args = (class_logits, target, class_start, num_classes, weight)
    if masked_ids is not None and columns > 0:
        lse, *other_statistics = statistics_by_lse(class_logits, target, class_start, False, options)
        ids_args = (masked_ids, columns, class_start, num_classes)
        statistics = (reference_ids.lse_of_others(lse, *ids_args, options=options), *other_statistics)
        packed = pack_statistics(statistics, class_start, columns, weight, False)
    elif with_entropy:
        packed = pack_statistics(rank_statistics(*slice_args, True, options), class_start, columns, weight, True)
    else:
        packed = _ops.cross_entropy_shard(*slice_args, **keywords)
    return packed if at_ids is None else torch.cat([packed, at_ids.t().reshape(1, -1)], 1), logits


def padded_logits(
    input: Tensor,
    head: Tensor,
    bias: Tensor | None,
    count: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """(rows, padded_classes)."""
    columns, dtype = head.shape[0], logits_dtype or input.dtype
    kernels = None if count is None else counting_kernels(input, head)
    new = input.new_empty if kernels is None else input.new_zeros
    logits = new((input.shape[0], padded_classes(columns, dtype)), dtype=dtype)
    class_logits = first_columns(logits, columns)
    if kernels is None:
        logits_of(input, head, bias, class_logits)
    else:
        kernels.logits(input, head, bias, count, class_logits)
    if class_logits is not logits:
        logits[:, columns:].zero_()  # an operator must not return memory that nobody wrote
    return logits


def chunk_grad_(
    logits: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    class_start: int = 0,
    num_classes: int | None = None,
    weight: Tensor | None = None,
    divisors: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    lse_coefficient: Tensor | None = None,
    with_grad_input: bool = True,
    count: Tensor | None = None,
    after: Tensor | None = None,
    ids: Tensor | None = None,
    at_ids: Tensor | None = None,
    grad_ids: Tensor | None = None,
    mask_ids: bool = False,
    lse_low: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> tuple[Tensor, Tensor]:
    head, _, weight, _ = classes_of(linear_weight, None, weight, class_start, num_classes)
    class_logits = first_columns(logits, head.shape[0])
    dtype = None if logits.dtype == linear_weight.dtype else linear_weight.dtype
    if ids is not None and at_ids is not None and grad_ids is not None:
        ids_args = (grad_ids, grad_lse, grad_entropy, class_logits, ids, at_ids, lse, entropy, lse_low, mask_ids)
        slice_args: dict[str, Any] = {"class_start": class_start, "num_classes": num_classes, "grad_dtype": dtype}
        gradient(*ids_args, options=options, **slice_args, writer=InPlace(), target=target)
    else:
        row_args = (grad_loss, grad_lse, class_logits, target, lse, weight, divisors, grad_entropy, entropy)
        backward_args = (*row_args, lse_coefficient, class_start, num_classes, dtype, lse_low)
        _ops.cross_entropy_backward_(*backward_args, lse_square_scale=lse_square_scale, **options.keywords())
    return input_gradient(class_logits, dtype, head, count, with_grad_input), linear_weight.new_empty(0)


def input_gradient(
    logits: Tensor, dtype: torch.dtype | None, head: Tensor, count: Tensor | None, is_wanted: bool
) -> Tensor:
    """From the gradient that was written over a chunk's logits, in this dtype; (0,) if it is not wanted."""
    grad_logits = gradient_in(logits, dtype)
    if not is_wanted:
        return head.new_empty(0)
    shape = (logits.shape[0], head.shape[1])
    kernels = None if count is None else counting_kernels(head.new_empty(()).expand(shape), head)
    if kernels is None:
        return write_product(grad_logits, head)
    assert count is not None
    grad_input = head.new_zeros(shape)
    kernels.grad_input(grad_logits, head, count, torch.arange(shape[0], device=logits.device), grad_input)
    return grad_input


def chunk_add_(
    grad_linear_weight: Tensor,
    grad_linear_bias: Tensor,
    grad_logits: Tensor,
    input: Tensor,
    columns: int,
    first: bool,
    count: Tensor | None = None,
    shares: Tensor | None = None,
) -> None:
    """A gradient of shape (0,) is not wanted. With ``first`` the sums start at zero. ``shares``: factors of rows."""
    class_grads = front_of(first_columns(grad_logits, columns), input.dtype)
    if grad_linear_weight.dim() == 2:
        class_total, input = part_of(grad_linear_weight, slice(0, columns)), times(input, shares)
        kernels = None if count is None else counting_kernels(input, class_total)
        if kernels is None:
            add_product(class_total, class_grads.t(), input, first)
        else:
            kernels.grad_weight(class_grads, input, count, class_total, add=not first)
    if grad_linear_bias.numel() > 0:
        add_rows(part_of(grad_linear_bias, slice(0, columns)), class_grads, first, shares)
    if first:
        zero_behind(grad_linear_weight, grad_linear_bias, columns)
