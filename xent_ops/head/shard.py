"""One rank's slice of the head, by chunks of rows (chunks.py): statistics, the join, one chunk at a time.

A rank packs its rows' statistics into one tensor for the all-gather. Without entropies these are the largest x, the
total relative to it and the part of the loss. With entropies they are the lse l_r, 1 and the loss of the rank's own
columns, all relative to p_r = l_r (kernels/reference_shard.py), and at the end the entropies H_r. After the join::

    entropy = sum_r exp(l_r - lse) (H_r + lse - l_r)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import reference, reference_ids, reference_shard
from ..kernels.options import DEFAULTS, Chunking, RowOptions
from ..kernels.rows import front_of, padded_classes
from .backend import IN_MEMORY, Backend
from .chunks import as_rows, classes_of
from .float16 import times
from .ids import gradient
from .products import (
    InPlace,
    add_product,
    add_rows,
    counting_kernels,
    gradient_in,
    logits_of,
    zero_behind,
)

_ops = torch.ops.xent
_HEADER = reference_shard.HEADER
_SKIPPED = (float("-inf"), 0.0, 0.0, 0.0)  # the statistics of a skipped row
_NOWHERE = -1  # the ignore_index of rows whose target has been made a column of this rank


def width(rows: int, weighted: bool, with_entropy: bool, ids_per_row: int = 0) -> int:
    """The number of values in the packed statistics of a rank."""
    return reference_shard.width(rows, weighted) + (rows if with_entropy else 0) + ids_per_row * rows


def statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    with_entropy: bool = False,
    *,
    options: RowOptions = DEFAULTS,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> Tensor:
    flat, chunking = as_rows(input), Chunking(**fields)
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, head))
    columns = len(head)

    def visit(logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        return rank_statistics(logits, target, class_start, num_classes, weight, with_entropy, options)

    if columns == 0:
        computed: Sequence[Tensor] = visit(flat[:, :0], target.reshape(-1))
    else:
        computed = backend.products(rows, flat, head, bias, chunking).run(visit, rows.indices())
        computed = [rows.unpack(values, fill) for values, fill in zip(computed, _SKIPPED, strict=False)]
    return pack_statistics(computed, class_start, columns, weight, with_entropy)


def rank_statistics(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None,
    with_entropy: bool,
    options: RowOptions,
) -> Sequence[Tensor]:
    """Three statistics of each row of logits (see the module), then w_t or the entropy."""
    if not with_entropy:
        packed = _ops.cross_entropy_shard(logits, target, class_start, num_classes, weight, **options.keywords())
        return packed[0, :-_HEADER].view(3 if weight is None else 4, -1).unbind()
    if logits.shape[1] == 0:
        zeros = logits.new_zeros(target.shape, dtype=reference.accumulator(logits))
        return zeros - float("inf"), zeros, zeros, zeros
    return _statistics_by_lse(logits, target, class_start, True, options)


def _statistics_by_lse(
    logits: Tensor, target: Tensor, class_start: int, with_entropy: bool, options: RowOptions
) -> Sequence[Tensor]:
    """Three statistics of each row, relative to the lse of these logits, and the entropy if it is wanted."""
    column = target.to(torch.int64) - class_start
    is_here = (column >= 0) & (column < logits.shape[1]) & reference.is_counted(target, options.ignore_index)
    # A row without a target here takes the first column: the entropy of an ignored row would be 0.
    column, keywords = torch.where(is_here, column, 0), options._replace(ignore_index=_NOWHERE).keywords()
    loss, lse, _, entropy, lse_low = _ops.cross_entropy_forward(logits, column, None, False, with_entropy, **keywords)
    part = torch.where(is_here, loss - lse_low, 0.0)  # relative to the rounded lse
    statistics = (lse, lse_low.exp(), part)
    return (*statistics, entropy) if with_entropy else statistics


def pack_statistics(
    statistics: Sequence[Tensor], class_start: int, columns: int, weight: Tensor | None, with_entropy: bool
) -> Tensor:
    """(1, width): the statistics of rows. The header comes before the entropies."""
    dtype = statistics[0].dtype
    sum_weights = statistics[0].new_full((), columns) if weight is None else weight.to(dtype).sum()
    header = reference_shard.header(class_start, columns, sum_weights)
    return torch.cat([*statistics[:3], header, *statistics[3:]] if with_entropy else [*statistics, header]).unsqueeze(0)


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
    with_entropy: bool = False,
    *,
    options: RowOptions = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # only the backward uses it
    group_name: str = "",  # only the backward uses it
    in_rank_order: bool = False,
    **fields: Any,
) -> tuple[Tensor, ...]:
    # The join of rows reads only the logits' shape.
    logits = input.new_empty(()).expand(*target.shape, linear_weight.shape[0])
    loss, lse, target_weight, lse_coefficient, entropy, lse_low, _ = join_statistics(
        gathered, logits, target, (class_start, num_classes), weight, with_entropy, options, 0, in_rank_order
    )
    assert target_weight is not None and lse_coefficient is not None
    if Chunking(**fields).skip_ignored:
        lse = lse.masked_fill(~reference.is_counted(target, options.ignore_index), float("inf"))
    return loss, lse, target_weight, lse_coefficient, entropy, lse_low


class RowStatistics(NamedTuple):
    """Joined statistics of rows, which all ranks know, each of the target's shape."""

    loss: Tensor
    lse: Tensor
    target_weight: Tensor | None  # None: this rank has all classes
    lse_coefficient: Tensor | None  # None: this rank has all classes
    entropy: Tensor  # (0,) if it is not wanted
    lse_low: Tensor
    at_ids: Tensor | None = None  # (n, K): x of several classes per row, if they were asked for


def join_statistics(
    gathered: Tensor,
    logits: Tensor,
    target: Tensor,
    shard_range: tuple[int, int | None],
    weight: Tensor | None,
    with_entropy: bool,
    options: RowOptions,
    ids_per_row: int = 0,
    in_rank_order: bool = False,  # torch's sum of five or more ranks has another order at other places
) -> RowStatistics:
    """Join the packed statistics of all ranks. It reads only the shape of the logits."""
    class_start, num_classes = shard_range
    if num_classes is None:
        loss, lse, lse_low, *entropy_and_ids = gathered.unbind()
        entropy = entropy_and_ids[0] if with_entropy else loss.new_empty(0)
        at_ids = gathered[-ids_per_row:].t() if ids_per_row else None
        return RowStatistics(loss, lse, None, None, entropy, lse_low, at_ids)
    at_ids = None
    if ids_per_row:
        ids_start = gathered.shape[1] - ids_per_row * target.numel()
        at_ids = gathered[:, ids_start:].sum(0).view(ids_per_row, -1).t()
        gathered = gathered[:, :ids_start]
    num_entropies = target.numel() if with_entropy else 0
    statistics = gathered[:, : gathered.shape[1] - num_entropies]
    loss, lse, target_weight, lse_coefficient, lse_low = _ops.cross_entropy_shard_join(
        logits, target, statistics, class_start, num_classes, weight, **options.keywords()
    )
    entropy = gathered.new_empty(0)
    if with_entropy:
        rank_lse, all_lse = gathered[:, :num_entropies], lse.reshape(-1)
        rank_low, all_low = gathered[:, num_entropies : 2 * num_entropies].log(), lse_low.reshape(-1)
        distance = (all_lse - rank_lse) + (all_low - rank_low)
        share = (-distance).exp()
        parts = share * (gathered[:, gathered.shape[1] - num_entropies :] + distance)
        parts = torch.where(share == 0.0, 0.0, parts)
        entropy = (reference_shard.sum_in_order(parts) if in_rank_order else parts.sum(0)).view(target.shape)
        entropy = torch.where(reference.is_counted(target, options.ignore_index), entropy, 0.0)
    return RowStatistics(loss, lse, target_weight, lse_coefficient, entropy, lse_low, at_ids)


# One chunk at a time, for loop.py. A chunk's logits (rows, padded_classes) live from its first operator to its last.


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
    columns, at_ids = head.shape[0], None
    if ids is not None and mask_ids:
        at_ids, logits = writer.mask_columns(logits, columns, ids, (class_start, num_classes), options)
    elif ids is not None:
        at_ids = _ops.ids_forward(logits[:, :columns], ids, class_start, num_classes, **options.keywords())
    slice_args = (logits[:, :columns], target, class_start, num_classes, weight)
    return chunk_statistics(*slice_args, with_entropy, at_ids, ids if mask_ids else None, options), logits


def padded_logits(
    input: Tensor,
    head: Tensor,
    bias: Tensor | None,
    count: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """(rows, padded_classes)."""
    columns, dtype = head.shape[0], logits_dtype or input.dtype
    kernels = None if count is None or dtype != input.dtype else counting_kernels(input, head)
    new = input.new_empty if kernels is None else input.new_zeros
    logits = new((input.shape[0], padded_classes(columns, dtype)), dtype=dtype)
    class_logits = logits[:, :columns]
    if kernels is None:
        logits_of(input, head, bias, class_logits)
    else:
        kernels.logits(input, head, bias, count, class_logits)
    logits[:, columns:].zero_()  # an operator must not return memory that nobody wrote
    return logits


def chunk_statistics(
    logits: Tensor,  # (n, columns)
    target: Tensor,
    class_start: int,
    num_classes: int | None,
    weight: Tensor | None,
    with_entropy: bool,
    at_ids: Tensor | None,
    masked_ids: Tensor | None,
    options: RowOptions,
) -> Tensor:
    """The packed statistics of this rank."""
    ids_rows = None if at_ids is None else at_ids.t()  # they are packed last
    if num_classes is None:
        loss, lse, _, entropy, lse_low = _ops.cross_entropy_forward(
            logits, target, weight, False, with_entropy, **options.keywords()
        )
        if masked_ids is not None:
            lse = reference_ids.lse_of_others(lse, masked_ids, logits.shape[1], options=options)
        columns = (loss, lse, lse_low, entropy) if with_entropy else (loss, lse, lse_low)
        rows = [value.unsqueeze(0) for value in columns]
        return torch.cat(rows if ids_rows is None else [*rows, ids_rows])
    slice_args = (logits, target, class_start, num_classes, weight)
    if masked_ids is not None and logits.shape[1] > 0:
        lse, *other_statistics = _statistics_by_lse(logits, target, class_start, False, options)
        ids_args = (masked_ids, logits.shape[1], class_start, num_classes)
        statistics = (reference_ids.lse_of_others(lse, *ids_args, options=options), *other_statistics)
        packed = pack_statistics(statistics, class_start, logits.shape[1], weight, False)
    elif with_entropy:
        with_entropies = rank_statistics(*slice_args, True, options)
        packed = pack_statistics(with_entropies, class_start, logits.shape[1], weight, True)
    else:
        packed = _ops.cross_entropy_shard(*slice_args, **options.keywords())
    return packed if ids_rows is None else torch.cat([packed, ids_rows.reshape(1, -1)], 1)


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
    class_logits = logits[:, : head.shape[0]]
    dtype = None if logits.dtype == linear_weight.dtype else linear_weight.dtype
    if ids is not None and at_ids is not None and grad_ids is not None:
        ids_args = (grad_ids, grad_lse, grad_entropy, class_logits, ids, at_ids, lse, entropy, mask_ids)
        slice_args: dict[str, Any] = {"class_start": class_start, "num_classes": num_classes, "grad_dtype": dtype}
        gradient(*ids_args, options=options, **slice_args, writer=InPlace(), target=target)
    else:
        row_args = (grad_entropy, entropy, lse_coefficient)
        backward_args = (weight, divisors, *row_args, class_start, num_classes, dtype, lse_low)
        _ops.cross_entropy_backward_(
            grad_loss,
            grad_lse,
            class_logits,
            target,
            lse,
            *backward_args,
            lse_square_scale=lse_square_scale,
            **options.keywords(),
        )
    done, grad_logits = linear_weight.new_empty(0), gradient_in(class_logits, dtype)
    if not with_grad_input:
        return linear_weight.new_empty(0), done
    shape = (logits.shape[0], head.shape[1])
    can_count = count is not None and dtype is None
    kernels = counting_kernels(logits.new_empty(()).expand(shape), head) if can_count else None
    if kernels is None:
        return torch.mm(grad_logits, head), done
    assert count is not None
    grad_input = logits.new_zeros(shape)
    kernels.grad_input(class_logits, head, count, torch.arange(shape[0], device=logits.device), grad_input)
    return grad_input, done


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
    class_grads = front_of(grad_logits[:, :columns], input.dtype)
    if grad_linear_weight.dim() == 2:
        class_total, input = grad_linear_weight[:columns], times(input, shares)
        can_count = count is not None and grad_logits.dtype == input.dtype
        kernels = counting_kernels(input, class_total) if can_count else None
        if kernels is None:
            add_product(class_total, class_grads.t(), input, first)
        else:
            kernels.grad_weight(class_grads, input, count, class_total, add=not first)
    if grad_linear_bias.numel() > 0:
        add_rows(grad_linear_bias[:columns], class_grads, first, shares)
    if first:
        zero_behind(grad_linear_weight, grad_linear_bias, columns)
