"""The loop over chunks of rows that is open in its middle.

What stands between a chunk's statistics and its gradient is the caller's: the all-gather of all ranks, a user's
function, or both. So tracers must see the loop, and its steps are operators (ops/linear/chunk.py). Loops with nothing
in the middle are inside of one operator: products.py. In the order of the device's stream, over ranks::

    logits of chunk 0, its statistics
    all-gather of the statistics of 0
    logits of 1, its statistics
    gradient over the logits of 0, its product with the head
    sum over ranks of the input's gradient of 0
    product for the weight's gradient of 0                    the logits of 0 are gone
    ...

Collectives run beside what stands below them, and two chunks of logits are there at a time; of one rank, one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.options import DEFAULT_CHUNKING, Chunking, LossOptions
from ..kernels.reference import columns_of
from . import shard
from .chunks import as_rows
from .products import accumulator_of_weight, room_for_head
from .shard import RowStatistics
from .sizes import rows_of_chunk

_ops = torch.ops.xent


class HeadSlice(NamedTuple):
    """The rows of the head that a rank holds, and how its chunks are made."""

    weight: Tensor  # (classes, H)
    bias: Tensor | None  # (classes,)
    class_weight: Tensor | None  # likewise
    shard_range: tuple[int, Any] = (0, None)  # class_start, num_classes; None: these are all classes
    accumulate_dtype: torch.dtype | None = None
    chunking: Chunking = DEFAULT_CHUNKING

    def columns(self) -> int:
        """How many of the rows are classes; those behind them are padding."""
        return columns_of(self.weight.shape[0], *self.shard_range)


class OneRank:
    """The collectives of one rank. Those of several begin where ``wait`` ends them: distributed/pipelined.py."""

    world = 1

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum(self, gradient: Tensor, scattered: bool) -> Tensor:
        """Over the ranks: all of it, or where ``scattered`` this rank's part."""
        return gradient

    def wait(self, tensor: Tensor) -> Tensor:
        return tensor


class Coefficients(NamedTuple):
    """What a chunk's gradient is made of, as ``cross_entropy_backward`` takes it: (n,), or () for all rows alike."""

    grad_loss: Tensor
    grad_lse: Tensor | None = None
    grad_entropy: Tensor | None = None
    divisors: Tensor | None = None  # (2,): what grad_loss and the gradient of the z-loss are divided by
    grad_ids: Tensor | None = None  # (n, K)


class Gradients(NamedTuple):
    """Of the input, (..., H), the weight and the bias; (0,) where they are not wanted. The last two are sums."""

    input: Tensor
    weight: Tensor
    bias: Tensor


class Part(NamedTuple):
    """The rows of a chunk: of each rank's input these, one rank's after the other's."""

    start: int  # no slice: Dynamo would specialise the ends of one
    stop: int
    target: Tensor  # (n,)
    ids: Tensor | None = None  # (n, K)

    def of(self, values: Tensor) -> Tensor:
        """(ranks, N, ...) to (n, ...)."""
        return values[:, self.start : self.stop].flatten(0, 1)


Kept = tuple[Tensor, ...]  # what a chunk keeps from the first product to the last; its logits come first


class Steps(Protocol):
    """What a loss does to a chunk of rows, before its statistics are gathered and behind that."""

    def begin(
        self, inputs: Sequence[Tensor], part: Part, count: Tensor | None, after: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """(statistics, what is kept). ``inputs``: (n, H), the chunk's rows of each of the loop's."""

    def end(
        self,
        kept: Kept,
        part: Part,
        gathered: Tensor,  # which is waited for where it is read
        wanted: Sequence[bool],  # which gradients
        count: Tensor | None,
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """(the input's gradient, done), with that of the logits over them; None where no gradient is wanted."""


Between = Callable[[RowStatistics, Part], Coefficients]


class _CrossEntropy:
    """Statistics and gradient of rows of logits, with the caller's function between them."""

    def __init__(
        self, head: HeadSlice, loss: LossOptions, between: Between, ranks: OneRank, with_entropy: bool, mask_ids: bool
    ) -> None:
        self.weight, self.bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        self.head, self.loss, self.between, self.ranks, self.with_entropy = head, loss, between, ranks, with_entropy
        self.columns, self.mask_ids = head.columns(), mask_ids

    def begin(
        self, inputs: Sequence[Tensor], part: Part, count: Tensor | None, after: Tensor | None
    ) -> tuple[Tensor, Kept]:
        of_head = (
            self.weight,
            part.target,
            *self.head.shard_range,
            self.bias,
            self.head.class_weight,
            self.with_entropy,
        )
        more = (count, after, part.ids, self.mask_ids, self.head.chunking.logits_dtype)
        stats, logits = _ops.linear_cross_entropy_chunk(inputs[0], *of_head, *more, **self.loss.rows.keywords())
        return stats, (logits,)

    def end(
        self,
        kept: Kept,
        part: Part,
        gathered: Tensor,
        wanted: Sequence[bool],
        count: Tensor | None,
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        (logits,), shard_range, class_weight = kept, self.head.shard_range, self.head.class_weight
        weight_of_classes = None if class_weight is None else class_weight[: self.columns]
        of_slice, places = (shard_range, weight_of_classes), 0 if part.ids is None else part.ids.shape[1]
        of_rows = shard.joined(
            self.ranks.wait(gathered),
            logits[:, : self.columns],
            part.target,
            *of_slice,
            self.with_entropy,
            self.loss.rows,
            places,
        )
        grad_loss, grad_lse, grad_entropy, divisors, grad_ids = self.between(of_rows, part)
        if not any(wanted):
            return None
        return _ops.linear_cross_entropy_chunk_grad_(
            logits,
            grad_loss,
            grad_lse,
            self.weight,
            part.target,
            of_rows.lse,
            *shard_range,
            class_weight,
            divisors,
            grad_entropy,
            None if grad_entropy is None else of_rows.entropy,
            None if class_weight is None else of_rows.coefficient,
            wanted[0],
            count,
            after,
            *((None,) * 3 if grad_ids is None else (part.ids, of_rows.at_ids, grad_ids)),
            self.mask_ids,
            **self.loss.backward_keywords(),
        )


def gradients(
    input: Tensor,  # as ``of_steps`` takes them
    target: Tensor,
    head: HeadSlice,
    loss: LossOptions,
    between: Between,
    ranks: OneRank,
    wanted: Sequence[bool],
    *,
    with_entropy: bool = False,
    mask_ids: bool = False,  # the lse of rows is that of the classes that no id names
    **how: Any,
) -> Gradients:
    """The gradients of all rows. ``between`` sees each chunk's statistics once, in the order of the rows."""
    steps = _CrossEntropy(head, loss, between, ranks, with_entropy, mask_ids)
    return of_steps(steps, (input,), target, head, ranks, wanted, **how)


class _Chunk(NamedTuple):
    """What the first product of a chunk leaves. Collectives in flight are waited for where they are read."""

    input: Tensor  # (n, H)
    part: Part
    kept: Kept
    stats: Tensor
    gathered: Tensor


def of_steps(
    steps: Steps,
    inputs: Sequence[Tensor],  # (..., H) of this rank: the one that gradients are of, and what else has these rows
    target: Tensor,  # of all rows: (...), or (ranks, ...) where ``scattered``
    head: HeadSlice,
    ranks: OneRank,
    wanted: Sequence[bool],  # which gradients
    *,
    count: Tensor | None = None,  # (): how many of the rows come first that are counted
    scattered: bool = False,  # the inputs are this rank's part of the rows
    summed: bool = True,  # over the ranks; else the input's gradient is this rank's part of a sum
    ids: Tensor | None = None,  # several classes of each row, (parts, N, K) as the targets are arranged
) -> Gradients:
    """The loop."""
    input, parts = inputs[0], ranks.world if scattered else 1
    flat, targets = [as_rows(rows.detach()) for rows in inputs], target.reshape(parts, -1)
    ends = _ends(targets.shape[1], parts, flat[0], head, ranks.world)
    of_chunks = [[rows[start:end] for rows in flat] for start, end in itertools.pairwise(ends)]
    if scattered:
        of_chunks = [[ranks.gather(part.contiguous()) for part in of_chunk] for of_chunk in of_chunks]

    counts: list[Tensor | None] = [None] * len(of_chunks)
    if count is not None:
        numbers = [(count - start).clamp(0, stop - start) for start, stop in itertools.pairwise(ends)]
        counts = [number.to(torch.int32) for number in numbers]

    def begin(i: int, after: Tensor | None) -> _Chunk:
        mine = [ranks.wait(part) for part in of_chunks[i]] if scattered else of_chunks[i]
        start, stop = ends[i], ends[i + 1]
        part = Part(start, stop, targets[:, start:stop].reshape(-1))
        if ids is not None:
            part = part._replace(ids=part.of(ids))
        stats, kept = steps.begin(mine, part, counts[i], after)
        return _Chunk(mine[0], part, kept, stats, ranks.gather(stats))

    sums = accumulator_of_weight(input.dtype, head.accumulate_dtype)
    grad_weight, grad_bias = room_for_head(head.weight.detach(), head.weight.shape, wanted[1:], sums)
    columns = head.columns()
    grad_inputs: list[Tensor] = []
    # ``after`` keeps the order of the loop in a graph. What a function computes of two chunks' rows may be fused where
    # both read one tensor, a divisor for example: then the logits of all chunks would have to be there before the first
    # gradient (of 8192 x 4096 x 128256 3026 MiB, not 1568, 2026-11-25).
    ahead, done = ranks.world > 1, None
    chunk = begin(0, None)
    for i in range(len(of_chunks)):
        x, part, kept, _, gathered = chunk
        del chunk  # which holds the logits
        after = None
        if ahead and i + 1 < len(of_chunks):
            chunk = begin(i + 1, done)
            after = chunk.stats
        made = steps.end(kept, part, gathered, wanted, counts[i], after)
        if made is not None:
            grad_input, done = made
            if wanted[0]:
                grad_inputs.append(ranks.sum(grad_input, scattered) if summed else grad_input)
            if wanted[1] or wanted[2]:
                _ops.linear_cross_entropy_chunk_add_(grad_weight, grad_bias, kept[0], x, columns, i == 0, counts[i])
            del grad_input, made
        del kept
        if not ahead and i + 1 < len(of_chunks):
            chunk = begin(i + 1, done)
    total = input.new_empty(0)
    if wanted[0]:
        parts_of_total = [ranks.wait(part) for part in grad_inputs] if summed else grad_inputs
        total = (parts_of_total[0] if len(of_chunks) == 1 else torch.cat(parts_of_total)).view(input.shape)
    return Gradients(total, grad_weight, grad_bias)


def _ends(number: int, parts: int, rows: Tensor, head: HeadSlice, world: int) -> list[int]:
    """Where chunks begin and end, as even as they get, from what is the same on every rank: all loop as often.

    Small local logits are one chunk: all local logits at once, unfused, would be 2 % faster (two H200s,
    8192 x 4096 x 32064; docs/lab/2026-11-linear.md).
    """
    num_classes = head.weight.shape[0] if head.shard_range[1] is None else head.shard_range[1]
    how = head.chunking
    size = rows_of_chunk(parts * number, rows, -(-num_classes // world), False, how.chunk_rows, how.logits_dtype)
    count = max(-(-(parts * number) // size), 1)
    return [number * i // count for i in range(count + 1)]


def wanted_gradients(input: Tensor, head: HeadSlice) -> list[bool]:
    enabled = torch.is_grad_enabled()
    return [enabled and tensor is not None and tensor.requires_grad for tensor in (input, head.weight, head.bias)]


def value(value: Tensor, input: Tensor, head: HeadSlice, made: Gradients, divisor: Tensor | None) -> Tensor:
    """The loss, whose derivatives are these gradients divided by the divisor, once."""
    of: tuple[Any, ...] = (input, head.weight, head.bias, *made, divisor)
    return _ops.attach_gradients(value, *of)
