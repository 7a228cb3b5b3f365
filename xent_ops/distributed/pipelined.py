"""Linear cross entropy over ranks in three products: a chunk's statistics are gathered beside the next one's product.

In the order of the device's stream, for chunks of rows 0, 1, ...; collectives run beside what stands below them:

    logits of 0, its statistics
    all-gather of the statistics of 0
    logits of 1, its statistics
    gradient over the logits of 0, its product with the head
    all-reduce of the input's gradient of 0
    product for the weight's gradient of 0                 the logits of 0 are gone
    ...

Two chunks of logits are there at a time. The gradients are made in the forward, and the backward multiplies them by the
upstream gradient, in place. With ``sequence_parallel`` each chunk's input is gathered before its product, and its
gradient reduce-scattered. Operators: ops/linear/chunk.py.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..head import chunks, float16
from ..head.products import accumulator_of_weight, room_for_head
from ..head.sizes import rows_of_chunk
from ..kernels import reductions, reference
from ..kernels.options import LossOptions
from ..kernels.reference import columns_of
from ..ops.linear import checks as linear_checks
from ..ops.linear import composite
from ..ops.shown import shown
from .groups import Ranks
from .sharded_head import ShardedHead, reduced
from .vocab_parallel import RowValues

_ops = torch.ops.xent
_collectives = torch.ops._c10d_functional


class _Chunk(NamedTuple):
    """What the first product of a chunk leaves. Collectives in flight are waited for where they are read."""

    input: Tensor  # (rows, H)
    target: Tensor  # (rows,)
    logits: Tensor
    stats: Tensor
    gathered: Tensor


def chosen(asked: bool | None, input: Tensor, head: ShardedHead, loss: LossOptions) -> bool:
    """Does this call take the way of this file? All ranks answer alike."""
    if not (asked is None or isinstance(asked, bool)):
        raise TypeError(f"pipelined must be True, False or None, got {shown(asked)}")
    possible = loss.reduction != "none" and not head.chunking.skips
    if asked and not possible:
        raise ValueError(
            'pipelined=True makes the gradients of a mean or a sum of all rows: expected reduction="mean" or "sum", '
            "without skip_ignored and max_counted"
        )
    wanted = any(tensor is not None and tensor.requires_grad for tensor in (input, head.weight, head.bias))
    return asked is not False and possible and wanted and torch.is_grad_enabled() and not composite.forward_runs_twice()


def loss(
    input: Tensor,  # (..., H) of this rank
    target: Tensor,  # of all rows: (...), or (ranks, ...) where the input is this rank's part
    head: ShardedHead,
    ranks: Ranks,
    options: LossOptions,
    divisor: Tensor | None,
    scattered: bool,
    sum_grad_input: bool = True,
) -> Tensor:
    """The mean or the sum. At least one of input, weight and bias requires grad.

    Without ``sum_grad_input`` the gradient is this rank's part of the sum.
    """
    if divisor is not None and divisor.requires_grad:
        linear_checks.divisor_needs_grad()
    weight, bias, class_weight, (class_start, num_classes), accumulate_dtype, how = head
    wanted = [tensor is not None and tensor.requires_grad for tensor in (input, weight, bias)]
    parts = ranks.world if scattered else 1
    rows, targets = chunks.as_rows(input.detach()), target.reshape(parts, -1)
    number = targets.shape[1]
    # From what is the same on every rank: all loop as often. Small local logits are one chunk: all local logits at
    # once, unfused, would be 2 % faster (two H200s, 8192 x 4096 x 32064; docs/lab/2026-11-linear.md).
    size = rows_of_chunk(parts * number, rows, -(-num_classes // ranks.world), False, how.chunk_rows)
    count = max(-(-(parts * number) // size), 1)
    ends = [number * i // count for i in range(count + 1)]  # as even as they get
    frozen, frozen_bias = weight.detach(), None if bias is None else bias.detach()
    shard = (class_start, num_classes)
    inputs = [rows[start:end] for start, end in itertools.pairwise(ends)]
    if scattered:
        inputs = [_begin_gather(part.contiguous(), ranks) for part in inputs]

    def begin(i: int) -> _Chunk:
        x = _wait(inputs[i], ranks) if scattered else inputs[i]
        t = targets[:, ends[i] : ends[i + 1]].reshape(-1)
        stats, logits = _ops.linear_cross_entropy_chunk(
            x, frozen, t, *shard, frozen_bias, class_weight, **options.rows.keywords()
        )
        return _Chunk(x, t, logits, stats, _begin_gather(stats, ranks))

    summed = ranks if sum_grad_input else Ranks("", 0, 1)
    divisors = _divisors(target, head, ranks, options, divisor, reference.accumulator(input))
    within, later = float16.split_divisors(input.dtype, divisors)
    sums = accumulator_of_weight(input.dtype, accumulate_dtype)
    grad_weight, grad_bias = room_for_head(frozen, frozen.shape, wanted[1:], sums)
    columns = columns_of(weight.shape[0], *shard)
    made: list[tuple[Tensor, ...]] = []
    grad_inputs: list[Tensor] = []
    chunk = begin(0)
    for i in range(count):
        x, t, logits, _, gathered = chunk
        after = None
        if i + 1 < count:
            chunk = begin(i + 1)
            after = chunk.stats
        *of_rows, grad_input = _ops.linear_cross_entropy_chunk_grad_(
            logits,
            _wait(gathered, ranks),
            frozen,
            t,
            *shard,
            class_weight,
            within,
            after,
            wanted[0],
            **options.backward_keywords(),
        )
        made.append((*of_rows, t))
        if wanted[0]:
            grad_inputs.append(_begin_sum(grad_input, summed, scattered))
        if wanted[1] or wanted[2]:
            _ops.linear_cross_entropy_chunk_add_(grad_weight, grad_bias, logits, x, columns, i == 0)
    row_loss, lse, target_weight, all_targets = (torch.cat(values) for values in zip(*made, strict=True))
    value = reduced(RowValues(row_loss, lse, target_weight), all_targets, options, divisor)
    total = input.new_empty(0)
    if wanted[0]:
        parts_of_total = [_wait(part, summed) for part in grad_inputs]
        total = (parts_of_total[0] if count == 1 else torch.cat(parts_of_total)).view(input.shape)
    given: tuple[Any, ...] = (input, weight, bias, total, grad_weight, grad_bias, later)
    return _ops.linear_cross_entropy_value(value, *given)


def _begin_gather(tensor: Tensor, ranks: Ranks) -> Tensor:
    if ranks.world == 1:
        return tensor
    gathered = _collectives.all_gather_into_tensor(tensor, ranks.world, ranks.name)
    # Two all-gathers of gloo in flight at a time corrupt the heap, in plain torch too (2.11, 2.13, 2.15).
    return _collectives.wait_tensor(gathered) if tensor.device.type == "cpu" else gathered


def _begin_sum(gradient: Tensor, ranks: Ranks, scattered: bool) -> Tensor:
    """Of a chunk's input over the ranks: all of it, or this rank's part."""
    if ranks.world == 1:
        return gradient
    if scattered:
        return _collectives.reduce_scatter_tensor(gradient, "sum", ranks.world, ranks.name)
    return _collectives.all_reduce(gradient, "sum", ranks.name)


def _wait(tensor: Tensor, ranks: Ranks) -> Tensor:
    return tensor if ranks.world == 1 else _collectives.wait_tensor(tensor)


def _divisors(
    target: Tensor, head: ShardedHead, ranks: Ranks, options: LossOptions, divisor: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(2,), as divided_by of chunks.py: class weights of targets are summed over the ranks that hold them."""
    class_start, num_classes = head.shard_range
    weight = head.class_weight
    if weight is None or options.reduction != "mean":
        return chunks.divided_by(target, None, divisor, num_classes, dtype, options)
    ignore_index = options.rows.ignore_index
    columns = columns_of(head.weight.shape[0], *head.shard_range)
    column = target.to(torch.int64) - class_start
    mine = (column >= 0) & (column < columns) & reference.is_counted(target, ignore_index)
    if columns > 0:
        weights = torch.where(mine, weight.to(dtype)[torch.where(mine, column, 0)], 0.0)
    else:
        weights = torch.zeros_like(target, dtype=dtype)
    divisors = reductions.divisor_of(weights, target, ignore_index)
    if ranks.world == 1:
        return divisors
    total = _collectives.wait_tensor(_collectives.all_reduce(divisors[0], "sum", ranks.name))
    return torch.stack([total, divisors[1]])
