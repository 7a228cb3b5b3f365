"""The kernels of one rank's rows of the head, by chunks of rows as in chunks.py and by the operators of ops/shard.py.

With entropies a rank hands over the lse l_r and the entropy H_r of its own columns, as statistics relative to p_r = l_r
(kernels/reference_shard.py), and the entropies after them. With the lse of all ranks::

    entropy = sum_r exp(l_r - lse) (H_r + lse - l_r)

A row's gradient on a rank that does not hold the target is that of its lse alone: there the target is an ignored one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import reference, reference_shard
from ...kernels.options import DEFAULTS, Chunking, Options
from .. import checks
from .chunks import Gradients, as_rows, divisible
from .products import Products, rows_to_compute

_ops = torch.ops.xent
_HEADER = reference_shard.HEADER
_UNREAD = (float("-inf"), 0.0, 0.0, 0.0)  # the statistics of a row that is skipped
_NOWHERE = -1  # the target of a row whose class is on another rank, or that is ignored


def width(rows: int, weighted: bool, entropy: bool) -> int:
    """How many numbers a rank hands over."""
    return reference_shard.width(rows, weighted) + (rows if entropy else 0)


def _head_of_classes(
    linear_weight: Tensor, linear_bias: Tensor | None, weight: Tensor | None, class_start: int, num_classes: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The three without the rows that are padding."""
    columns = reference_shard.columns_of(linear_weight.shape[0], class_start, num_classes)
    bias, class_weight = (None if tensor is None else tensor[:columns] for tensor in (linear_bias, weight))
    return linear_weight[:columns], bias, class_weight


def stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    **chunking: Any,
) -> Tensor:
    if input.device.type == "cpu":  # also where no row operator sees the targets; elsewhere the join makes NaN of them
        checks.target_values(target, num_classes, options.ignore_index)
    flat, how, dtype = as_rows(input), Chunking(**chunking), reference.accumulator(input)
    head, bias, weight = _head_of_classes(linear_weight, linear_bias, weight, class_start, num_classes)
    rows = rows_to_compute(target, flat, head, options, how)  # of an empty shard too: all ranks raise, or none
    indices, shard, each = rows.indices(), (class_start, num_classes, weight), 3 if weight is None else 4
    if entropy:
        indices, keywords = _local_target(indices, class_start, len(head), options)
        each = 4
    else:
        keywords = options.keywords()
    # The largest logit, the total relative to it, the part of the loss; then w_t or the entropy.
    made = flat.new_full((each, rows.number), 0.0, dtype=dtype)
    made[0] = float("-inf")
    products = Products(rows, flat, head, bias, how.chunk_rows)
    for chunk, logits in products.chunks() if len(head) > 0 else ():
        if entropy:
            made[1, chunk] = 1.0
            values = _ops.cross_entropy_forward_entropy(logits, indices[chunk], **keywords)
            made[2, chunk], made[0, chunk], made[3, chunk] = values
        else:
            part = _ops.cross_entropy_shard(logits, indices[chunk], *shard, **keywords)[0, :-_HEADER]
            made[:, chunk] = part.view(each, -1)
    given = [rows.give(values, otherwise) for values, otherwise in zip(made, _UNREAD, strict=False)]
    sum_weights = made.new_full((), len(head)) if weight is None else weight.to(dtype).sum()
    header = reference_shard.header(class_start, len(head), sum_weights)
    numbers = [*given[:3], header, *given[3:]] if entropy else [*given, header]
    return torch.cat(numbers).unsqueeze(0)


def _local_target(target: Tensor, class_start: int, columns: int, options: Options) -> tuple[Tensor, dict[str, Any]]:
    """The targets as columns of this rank, and the options of a row operator that takes them."""
    column = target.to(torch.int64) - class_start
    here = (column >= 0) & (column < columns) & reference.is_counted(target, options.ignore_index)
    return torch.where(here, column, _NOWHERE), options._replace(ignore_index=_NOWHERE).keywords()


def join(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    gathered_input: Tensor | None = None,
    entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # for the backward
    group_name: str = "",  # likewise
    **chunking: Any,
) -> tuple[Tensor, ...]:
    # The join of rows reads no logits, only their shape.
    logits = input.new_empty(()).expand(*target.shape, linear_weight.shape[0])
    number = target.numel() if entropy else 0
    of_ranks = gathered[:, : gathered.shape[1] - number]
    shard = (of_ranks, class_start, num_classes, weight)
    loss, lse, target_weight, coefficient = _ops.cross_entropy_shard_join(logits, target, *shard, **options.keywords())
    entropies = gathered.new_empty(0)
    if entropy:
        of_rank, of_all = gathered[:, :number], lse.reshape(-1)
        share = (of_rank - of_all).exp()
        parts = share * (gathered[:, gathered.shape[1] - number :] + of_all - of_rank)
        entropies = torch.where(share == 0.0, 0.0, parts).sum(0).view(target.shape)
    if Chunking(**chunking).skips:
        ignored = ~reference.is_counted(target, options.ignore_index)
        lse = lse.masked_fill(ignored, float("inf"))
        entropies = entropies.masked_fill(ignored, 0.0) if entropy else entropies
    return loss, lse, target_weight, coefficient, entropies


def gradients(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    coefficient: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> Gradients:
    """As linear_cross_entropy_backward of chunks.py; grad_input is this rank's part of it."""
    flat, keywords, how = as_rows(input), options.keywords(), Chunking(**chunking)
    head, bias, weight = _head_of_classes(linear_weight, linear_bias, weight, class_start, num_classes)
    if len(head) == 0:
        shapes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
        zeros = [input.new_zeros(shape if made else 0) for shape, made in zip(shapes, output_mask, strict=True)]
        return zeros[0], zeros[1], zeros[2]
    rows, shard = rows_to_compute(target, flat, head, options, how), (class_start, num_classes, weight)
    indices = rows.indices()
    values = (grad_loss.to(lse.dtype).expand_as(target), grad_lse, grad_entropy, lse, coefficient, entropy)
    of_rows = [None if value is None else rows.take(value) for value in values]
    factor = None
    if input.dtype == torch.float16:
        factor = _largest(indices, of_rows[4], options.ignore_index, *of_rows[:3])
        of_rows[:3] = [None if value is None else value / factor for value in of_rows[:3]]
    padding = len(linear_weight) - len(head)
    products = Products(rows, flat, head, bias, how.chunk_rows, output_mask, accumulate_dtype, padding)
    grad_weight, grad_bias = products.padded_weight, products.padded_bias
    for chunk, logits in products.chunks():
        a, b, c, z, coefficients, h = [None if value is None else value[chunk] for value in of_rows]
        if h is None:
            _ops.cross_entropy_shard_backward_(a, b, logits, indices[chunk], z, *shard, coefficients, **keywords)
        else:
            logits = _entropy_gradient(a, b, c, logits, indices[chunk], z, h, class_start, num_classes, options)
        products.add(chunk, logits)
    if factor is not None:
        for gradient in (products.input, grad_weight, grad_bias):
            _ops.scale_grad_(gradient, factor)
    grad_input = products.input.view(input.shape if output_mask[0] else 0)
    return grad_input, grad_weight.to(input.dtype), grad_bias.to(input.dtype)


def _entropy_gradient(
    grad_loss: Any,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Any,
    lse: Any,
    entropy: Tensor,
    class_start: int,
    num_classes: int,
    options: Options,
) -> Tensor:
    local, keywords = _local_target(target, class_start, logits.shape[-1], options)
    target = target.to(torch.int64)
    counted = reference.is_counted(target, options.ignore_index)
    valid = (target >= 0) & (target < num_classes)
    elsewhere = torch.where(counted & (local == _NOWHERE), torch.where(valid, grad_loss, float("nan")), 0.0)
    grad_lse = elsewhere if grad_lse is None else grad_lse.to(elsewhere.dtype) + elsewhere
    rows = (logits, local, lse, entropy)
    return _ops.cross_entropy_backward_entropy(grad_loss, grad_lse, grad_entropy, *rows, **keywords)


def _largest(target: Tensor, coefficient: Tensor | None, ignore_index: int, grad_loss: Any, *grads: Any) -> Tensor:
    """As of chunks.py. Where weights are not negative, the coefficient is at least what any column is multiplied by."""
    masses = torch.where(reference.is_counted(target, ignore_index), grad_loss, 0.0)
    if coefficient is not None:
        masses = masses * coefficient
    return divisible(
        torch.cat([masses.new_zeros(1), masses, *(grad for grad in grads if grad is not None)]).abs().max()
    )
