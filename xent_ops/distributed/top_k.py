"""The k most probable classes and the rank of the target where each rank holds some rows of the head. No gradient.

The loop over chunks (head/loop.py) with two all-gathers. That of a chunk's statistics has the target's logit too. When
it has arrived, each rank counts its own columns before the target. After the loop, one all-gather has the k best
columns of each rank, and one sum the counts: 12 k + 28 bytes a row and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..head import loop
from ..head.chunks import classes_of
from ..head.loop import ChunkLogits, RowRange
from ..head.shard import join_statistics, statistics_of_chunk
from ..kernels import reference
from ..kernels.options import DEFAULTS
from ..linear_call import LinearCall
from ..ops import arguments, checks
from ..outputs import TopK, top_k_of_rows
from .bound import Shard, bind_over_ranks, bind_shard
from .groups import Ranks
from .parts import all_gather, all_reduce, as_target, by_ranks
from .pipelined import Collectives

_ops = torch.ops.xent
_NO_CLASS = 2**62  # behind all classes
_NOTHING = (False, False, False)  # the gradients that are wanted


class _Bound(NamedTuple):
    """consistency.py compares all of it."""

    call: LinearCall
    k: int


class _TopK:
    """The steps of a chunk (loop.Steps), and what they found."""

    def __init__(self, call: LinearCall, k: int, with_rank: bool, ranks: Collectives, parts: int) -> None:
        self.head, self.options, self.k, self.with_rank = call.head, call.loss.row_options, k, with_rank
        self.ranks, self.parts, self.columns, self.start = ranks, parts, call.head.columns(), call.head.shard_range[0]
        self.order = {"logit_scale": self.options.logit_scale}
        # Of each chunk: logits and classes of this rank, (n, k); the target's logit, lse, entropy, number before it.
        self.best: list[tuple[Tensor, ...]] = []
        self.rows: list[tuple[Tensor, ...]] = []

    def begin(self, inputs: Sequence[Tensor], part: RowRange, after: Tensor | None) -> tuple[Tensor, ChunkLogits]:
        weight, bias, _, _ = classes_of(self.head.weight, self.head.bias, None, *self.head.shard_range)
        logits = _ops.linear_logits(inputs[0], weight, bias, part.counted, after, self.head.chunking.logits_dtype)
        own, number = logits[:, : self.columns], min(self.k, self.columns)
        row_args = (own, part.target, None, self.head.shard_range, None)
        statistics = statistics_of_chunk(*row_args, True, False, self.options)
        column = part.target.to(torch.int64) - self.start
        here = (column >= 0) & (column < self.columns)
        if self.columns == 0:
            ids, at_target = column.new_empty((len(column), 0)), statistics.new_zeros(len(column))
        else:
            ids = _ops.top_k(own, number, **self.order)[0]
            at_target = own.gather(-1, torch.where(here, column, 0).unsqueeze(-1)).squeeze(-1).to(statistics.dtype)
        worst = float("-inf") if self.options.is_increasing else float("inf")
        best = pad(own.gather(-1, ids).to(statistics.dtype), (0, self.k - number), value=worst)
        classes = pad(ids + self.start, (0, self.k - number), value=_NO_CLASS)
        self.best.append((self.whole(best, part), self.whole(classes, part)))
        return torch.cat([statistics, torch.where(here, at_target, 0.0).unsqueeze(0)], 1), (logits,)

    def end(
        self,
        chunk_logits: ChunkLogits,
        part: RowRange,
        gathered: Tensor,
        output_mask: Sequence[bool],
        after: Tensor | None,
    ) -> None:
        number, own = part.target.shape[0], chunk_logits[0][:, : self.columns]
        statistics, logits = gathered.split([gathered.shape[1] - number, number], 1)
        join_args = (self.head.shard_range, None, True, self.options, 0, self.ranks.in_rank_order)
        rows, at_target = join_statistics(statistics.contiguous(), own, part.target, *join_args), logits.sum(0)
        before = torch.zeros_like(part.target, dtype=torch.int64)
        if self.with_rank and self.columns > 0:
            column = part.target.to(torch.int64) - self.start
            before = _ops.top_k(own, 0, column, at_target, **self.order)[1]
        self.rows.append(
            tuple([self.whole(value, part) for value in (at_target, rows.lse, rows.entropy, before, rows.lse_low)])
        )

    def whole(self, values: Tensor, part: RowRange) -> Tensor:
        """The inverse of ``RowRange.of``, (parts, n, ...), without the rows that fill up the chunk."""
        return values.view(self.parts, -1, *values.shape[1:])[:, : part.stop - part.start]


def _rows(call: LinearCall, k: int, with_rank: bool, ranks: Ranks) -> tuple[Tensor, ...]:
    """The results of the operator ``linear_top_k``, of the target's shape."""
    split, options, num_classes = call.sequence_dim, call.loss.row_options, call.head.shard_range[1]
    target, collectives = by_ranks(call.target, split, ranks), Collectives(ranks)
    steps = _TopK(call, k, with_rank, collectives, 1 if split is None else ranks.world)
    loop_args = (target, call.head, collectives, _NOTHING, options.ignore_index)
    loop.run_loop(steps, (call.input,), *loop_args, scattered=split is not None)
    at_target, lse, entropy, before, low = (torch.cat(values, 1).flatten() for values in zip(*steps.rows, strict=True))
    logits, classes = (
        _of_all_ranks(torch.cat(values, 1).flatten(0, 1), ranks) for values in zip(*steps.best, strict=True)
    )
    by_class = classes.argsort(-1)  # whatever order the ranks have
    logits, classes = logits.gather(-1, by_class), classes.gather(-1, by_class)
    place = _ops.top_k(logits, k, **steps.order)[0]
    at_ids, ids = reference.activation(logits.gather(-1, place), options), classes.gather(-1, place)
    index = target.reshape(-1, 1).to(torch.int64)
    counted, valid = reference.is_counted(index, options.ignore_index), (index >= 0) & (index < num_classes)
    if with_rank:
        before = torch.where(counted & valid, all_reduce(before, ranks).unsqueeze(-1), -1).squeeze(-1)
        x = torch.where(valid, reference.activation(at_target.unsqueeze(-1), options), float("nan"))
        at_ids, ids = torch.cat([at_ids, x], -1), torch.cat([ids, index], -1)
        ids = torch.where(counted, ids, DEFAULTS.ignore_index)
    values = (at_ids, ids, lse, entropy, before, low)
    return tuple([as_target(value.view((*target.shape, *value.shape[1:])), split) for value in values])


def _of_all_ranks(values: Tensor, ranks: Ranks) -> Tensor:
    """(N, k) of each rank to (N, ranks * k)."""
    return all_gather(values.contiguous(), ranks).view(ranks.world, *values.shape).movedim(0, 1).flatten(1)


def top_k(shard: Shard, bind_call: Callable[[], tuple[LinearCall, int]], target: Tensor | None) -> TopK:
    def bind(ranks: Ranks) -> _Bound:
        if target is None and ranks.world > 1 and arguments.boolean("sequence_parallel", shard.sequence_parallel):
            raise ValueError("sequence_parallel=True splits one dimension of the target: pass target")
        call, number = bind_call()
        if call.head.accumulate_dtype is not None:
            raise ValueError("accumulate_dtype is of gradients, and linear_top_k with a shard has none")
        call = bind_shard(call, ranks, shard, by_chunks=True)
        checks.top_k(number, call.head.shard_range[1])
        return _Bound(call, number)

    with torch.no_grad():
        (call, k), ranks = bind_over_ranks("linear_top_k", shard, bind)
        values = _rows(call, k, target is not None, ranks.for_batches(call.head.chunking.batch_invariant))
        return top_k_of_rows(values, target, k, call.loss.row_options.ignore_index)
