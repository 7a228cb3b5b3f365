"""One rank's slice of the head, by chunks of rows (chunks.py): its statistics, and the join of all ranks'.

A rank packs its rows' statistics into one tensor for the all-gather. Without entropies these are the largest x, the
total relative to it and the part of the loss. With entropies they are the lse l_r, 1 and the loss of the rank's own
columns, all relative to p_r = l_r (kernels/reference_shard.py), and at the end the entropies H_r. After the join::

    entropy = sum_r exp(l_r - lse) (H_r + lse - l_r)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import reference, reference_ids, reference_shard
from ..kernels.options import DEFAULTS, Chunking, RowOptions
from .backend import IN_MEMORY, Backend
from .chunks import as_rows, classes_of

_ops = torch.ops.xent
_HEADER = reference_shard.HEADER
_SKIPPED = (float("-inf"), 0.0, 0.0, 0.0)  # the statistics of a skipped row
_NOWHERE = -1  # the ignore_index of rows whose target has been made a column of this rank


def width(rows: int, weighted: bool, with_entropy: bool, ids_per_row: int = 0) -> int:
    """The number of values in the packed statistics of a rank."""
    return reference_shard.width(rows, weighted) + (rows if with_entropy else 0) + ids_per_row * rows


def linear_cross_entropy_shard(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    with_entropy: bool = False,
    ids: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> Tensor:
    flat, chunking = as_rows(input), Chunking(**fields)
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, head))
    columns = len(head)

    def visit(logits: Tensor, target: Tensor, ids: Tensor | None) -> Sequence[Tensor]:
        statistics = rank_statistics(logits, target, class_start, num_classes, weight, with_entropy, options)
        if ids is None:
            return statistics
        at_ids = _ops.ids_forward(logits, ids, class_start, num_classes, **options.keywords())
        return *at_ids.unbind(-1), *statistics

    number = 0 if ids is None else ids.shape[-1]
    if columns == 0:
        computed: Sequence[Tensor] = visit(flat[:, :0], target.reshape(-1), None if ids is None else as_rows(ids))
    else:
        ids = None if ids is None else rows.pack_classes(ids)
        computed = backend.products(rows, flat, head, bias, chunking).run(visit, rows.indices(), ids)
        fills = (*(0.0,) * number, *_SKIPPED)
        computed = [rows.unpack(values, fill) for values, fill in zip(computed, fills, strict=False)]
    packed = pack_statistics(computed[number:], class_start, columns, weight, with_entropy)
    return torch.cat([packed, *(values.unsqueeze(0) for values in computed[:number])], 1) if number else packed


def rank_statistics(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None,
    with_entropy: bool,
    options: RowOptions,
    batch_invariant: bool = False,
) -> Sequence[Tensor]:
    """Three statistics of each row of logits (see the module), then w_t or the entropy."""
    if not with_entropy:
        packed = _ops.cross_entropy_shard(logits, target, class_start, num_classes, weight, **options.keywords())
        return packed[0, :-_HEADER].view(3 if weight is None else 4, -1).unbind()
    if logits.shape[1] == 0:
        zeros = logits.new_zeros(target.shape, dtype=reference.accumulator(logits))
        return zeros - float("inf"), zeros, zeros, zeros
    return statistics_by_lse(logits, target, class_start, True, options, batch_invariant)


def statistics_by_lse(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    with_entropy: bool,
    options: RowOptions,
    batch_invariant: bool = False,
) -> Sequence[Tensor]:
    """Three statistics of each row, relative to the lse of these logits, and the entropy if it is wanted."""
    column = target.to(torch.int64) - class_start
    is_here = (column >= 0) & (column < logits.shape[1]) & reference.is_counted(target, options.ignore_index)
    # A row without a target here takes the first column: the entropy of an ignored row would be 0.
    column, keywords = torch.where(is_here, column, 0), options._replace(ignore_index=_NOWHERE).keywords()
    flags = (False, with_entropy, batch_invariant)
    loss, lse, _, entropy, lse_low = _ops.cross_entropy_forward(logits, column, None, *flags, **keywords)
    part = torch.where(is_here, loss - lse_low, 0.0)  # relative to the rounded lse
    statistics = (lse, lse_low.exp(), part)
    return (*statistics, entropy) if with_entropy else statistics


def statistics_of_chunk(
    logits: Tensor,
    target: Tensor,
    ids: Tensor | None,
    shard_range: tuple[int, int | None],
    weight: Tensor | None,
    with_entropy: bool,
    mask_ids: bool,
    options: RowOptions,
) -> Any:
    """Of rows (n, columns): their ``RowStatistics``, or of a slice packed. ``mask_ids`` masks the ids' columns."""
    (start, num_classes), columns, keywords, at_ids = shard_range, logits.shape[1], options.keywords(), None
    masked = ids if mask_ids else None
    if ids is not None:
        at_ids = (_ops.mask_ids_ if mask_ids else _ops.ids_forward)(logits, ids, *shard_range, **keywords)
    if num_classes is None:
        loss, lse, _, entropy, low = _ops.cross_entropy_forward(logits, target, weight, False, with_entropy, **keywords)
        if masked is not None:
            lse = reference_ids.lse_of_others(lse, masked, columns, options=options)
        return RowStatistics(loss, lse, None, None, entropy, low, at_ids)
    slice_args = (logits, target, start, num_classes, weight)
    if masked is not None and columns > 0:
        lse, *others = statistics_by_lse(logits, target, start, False, options)
        lse = reference_ids.lse_of_others(lse, masked, columns, *shard_range, options=options)
        packed = pack_statistics((lse, *others), start, columns, weight, False)
    elif with_entropy:
        packed = pack_statistics(rank_statistics(*slice_args, True, options), start, columns, weight, True)
    else:
        packed = _ops.cross_entropy_shard(*slice_args, **keywords)
    return packed if at_ids is None else torch.cat([packed, at_ids.t().reshape(1, -1)], 1)


def pack_statistics(
    statistics: Sequence[Tensor], class_start: int, columns: int, weight: Tensor | None, with_entropy: bool
) -> Tensor:
    """(1, width): the statistics of rows. The header comes before the entropies."""
    dtype = statistics[0].dtype
    sum_weights = statistics[0].new_full((), columns) if weight is None else weight.to(dtype).sum()
    header = reference_shard.header(class_start, columns, sum_weights)
    return torch.cat([*statistics[:3], header, *statistics[3:]] if with_entropy else [*statistics, header]).unsqueeze(0)


def linear_cross_entropy_shard_join(
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
    ids: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # only the backward uses it
    group_name: str = "",  # only the backward uses it
    in_rank_order: bool = False,
    **fields: Any,
) -> tuple[Tensor, ...]:
    # The join of rows reads only the logits' shape.
    logits = input.new_empty(()).expand(*target.shape, linear_weight.shape[0])
    slice_args, number = ((class_start, num_classes), weight), 0 if ids is None else ids.shape[-1]
    loss, lse, target_weight, lse_coefficient, entropy, lse_low, at_ids = join_statistics(
        gathered, logits, target, *slice_args, with_entropy, options, number, in_rank_order
    )
    assert target_weight is not None and lse_coefficient is not None
    if Chunking(**fields).skip_ignored:
        lse = lse.masked_fill(~reference.is_counted(target, options.ignore_index), float("inf"))
    if at_ids is None:
        at_ids = loss.new_empty(0)
    else:
        at_ids = at_ids.reshape(*target.shape, number).clone(memory_format=torch.contiguous_format)
    return loss, lse, target_weight, lse_coefficient, entropy, lse_low, at_ids


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
