"""The loop over chunks of rows that is open in its middle.

Between a chunk's statistics and its gradient the caller's code runs: the all-gather of all ranks, a user's function,
or both. So tracers must see the loop, and its steps are operators (ops/linear/chunk.py). Loops with nothing in the
middle are inside of one operator: products.py. In the order of the device's stream, over ranks::

    logits of chunk 0, its statistics
    all-gather of the statistics of 0
    logits of 1, its statistics
    gradient over the logits of 0, its product with the head
    sum over ranks of the input's gradient of 0
    product for the weight's gradient of 0                    the logits of 0 are gone
    ...

A collective runs beside the work on the lines below it. Two chunks of logits exist at a time; with one rank, one.
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
from .products import accumulator_of_weight, head_gradients
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
    """The collectives of one rank do nothing. Those of several are in flight until ``wait``: pipelined.py."""

    world = 1

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum(self, gradient: Tensor, scattered: bool) -> Tensor:
        """Over the ranks: all of it, or where ``scattered`` this rank's part."""
        return gradient

    def wait(self, tensor: Tensor) -> Tensor:
        return tensor


class RowGradients(NamedTuple):
    """Upstream gradients of a chunk's rows, as ``cross_entropy_backward`` takes them: (n,), or () for all rows."""

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


class RowRange(NamedTuple):
    """The rows of a chunk: of each rank's input these, one rank's after the other's."""

    start: int  # no slice: Dynamo would specialise the ends of one
    stop: int
    target: Tensor  # (n,)
    ids: Tensor | None = None  # (n, K)

    def of(self, values: Tensor) -> Tensor:
        """(ranks, N, ...) to (n, ...)."""
        return values[:, self.start : self.stop].flatten(0, 1)


ChunkLogits = tuple[Tensor, ...]  # of each head; a chunk keeps them from its first product to its last


class Steps(Protocol):
    """What a loss does to a chunk of rows before its statistics are gathered, and after that."""

    def begin(
        self, inputs: Sequence[Tensor], part: RowRange, count: Tensor | None, after: Tensor | None
    ) -> tuple[Tensor, ChunkLogits]:
        """(statistics, logits). ``inputs``: (n, H), the chunk's rows of each of the loop's."""

    def end(
        self,
        chunk_logits: ChunkLogits,
        part: RowRange,
        gathered: Tensor,  # in flight: ``wait`` before reading it
        output_mask: Sequence[bool],  # which gradients
        count: Tensor | None,
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """(the input's gradient, done), with that of the logits over them; None where no gradient is wanted."""


Upstream = Callable[[RowStatistics, RowRange], RowGradients]


class _CrossEntropy:
    """Statistics and gradient of rows of logits, with the caller's function between them."""

    def __init__(
        self, head: HeadSlice, loss: LossOptions, upstream: Upstream, ranks: OneRank, with_entropy: bool, mask_ids: bool
    ) -> None:
        self.weight, self.bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        self.head, self.loss, self.upstream, self.ranks, self.with_entropy = head, loss, upstream, ranks, with_entropy
        self.columns, self.mask_ids = head.columns(), mask_ids

    def begin(
        self, inputs: Sequence[Tensor], part: RowRange, count: Tensor | None, after: Tensor | None
    ) -> tuple[Tensor, ChunkLogits]:
        head_args = (self.weight, part.target, *self.head.shard_range, self.bias, self.head.class_weight)
        chunk_args = (self.with_entropy, count, after, part.ids, self.mask_ids, self.head.chunking.logits_dtype)
        options = self.loss.row_options.keywords()
        statistics, logits = _ops.linear_cross_entropy_chunk(inputs[0], *head_args, *chunk_args, **options)
        return statistics, (logits,)

    def end(
        self,
        chunk_logits: ChunkLogits,
        part: RowRange,
        gathered: Tensor,
        output_mask: Sequence[bool],
        count: Tensor | None,
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        (logits,), shard_range, class_weight = chunk_logits, self.head.shard_range, self.head.class_weight
        weight_of_classes = None if class_weight is None else class_weight[: self.columns]
        slice_args, ids_per_row = (shard_range, weight_of_classes), 0 if part.ids is None else part.ids.shape[1]
        rows = shard.join_statistics(
            self.ranks.wait(gathered),
            logits[:, : self.columns],
            part.target,
            *slice_args,
            self.with_entropy,
            self.loss.row_options,
            ids_per_row,
        )
        grad_loss, grad_lse, grad_entropy, divisors, grad_ids = self.upstream(rows, part)
        if not any(output_mask):
            return None
        return _ops.linear_cross_entropy_chunk_grad_(
            logits,
            grad_loss,
            grad_lse,
            self.weight,
            part.target,
            rows.lse,
            *shard_range,
            class_weight,
            divisors,
            grad_entropy,
            None if grad_entropy is None else rows.entropy,
            None if class_weight is None else rows.lse_coefficient,
            output_mask[0],
            count,
            after,
            *((None,) * 3 if grad_ids is None else (part.ids, rows.at_ids, grad_ids)),
            self.mask_ids,
            **self.loss.backward_keywords(),
        )


def gradients(
    input: Tensor,  # as ``run_loop`` takes them
    target: Tensor,
    head: HeadSlice,
    loss: LossOptions,
    upstream: Upstream,
    ranks: OneRank,
    output_mask: Sequence[bool],
    *,
    with_entropy: bool = False,
    mask_ids: bool = False,  # the lse of rows is that of the classes that no id names
    **loop_options: Any,
) -> Gradients:
    """The gradients of all rows. ``upstream`` sees each chunk's statistics once, in the order of the rows."""
    steps = _CrossEntropy(head, loss, upstream, ranks, with_entropy, mask_ids)
    return run_loop(steps, (input,), target, head, ranks, output_mask, **loop_options)


class _PendingChunk(NamedTuple):
    """A chunk after its first product. ``gathered`` may be in flight: ``wait`` before reading it."""

    input: Tensor  # (n, H)
    part: RowRange
    logits: ChunkLogits
    statistics: Tensor
    gathered: Tensor


def run_loop(
    steps: Steps,
    inputs: Sequence[Tensor],  # (..., H) of this rank: the input that gradients are of, then others with the same rows
    target: Tensor,  # of all rows: (...), or (ranks, ...) where ``scattered``
    head: HeadSlice,
    ranks: OneRank,
    output_mask: Sequence[bool],  # which gradients
    *,
    count: Tensor | None = None,  # (): how many of the rows come first that are counted
    scattered: bool = False,  # the inputs are this rank's part of the rows
    sum_over_ranks: bool = True,  # over the ranks; else the input's gradient is this rank's part of a sum
    ids: Tensor | None = None,  # several classes of each row, (parts, N, K) as the targets are arranged
) -> Gradients:
    """The loop over chunks."""
    input, parts = inputs[0], ranks.world if scattered else 1
    flat, targets = [as_rows(rows.detach()) for rows in inputs], target.reshape(parts, -1)
    ends = _ends(targets.shape[1], parts, flat[0], head, ranks.world)
    chunk_inputs = [[rows[start:end] for rows in flat] for start, end in itertools.pairwise(ends)]
    if scattered:
        chunk_inputs = [[ranks.gather(part.contiguous()) for part in inputs_of_one] for inputs_of_one in chunk_inputs]

    counts: list[Tensor | None] = [None] * len(chunk_inputs)
    if count is not None:
        counted_rows = [(count - start).clamp(0, stop - start) for start, stop in itertools.pairwise(ends)]
        counts = [number.to(torch.int32) for number in counted_rows]

    def begin(i: int, after: Tensor | None) -> _PendingChunk:
        inputs_of_chunk = [ranks.wait(part) for part in chunk_inputs[i]] if scattered else chunk_inputs[i]
        start, stop = ends[i], ends[i + 1]
        part = RowRange(start, stop, targets[:, start:stop].reshape(-1))
        if ids is not None:
            part = part._replace(ids=part.of(ids))
        statistics, logits = steps.begin(inputs_of_chunk, part, counts[i], after)
        return _PendingChunk(inputs_of_chunk[0], part, logits, statistics, ranks.gather(statistics))

    sum_dtype = accumulator_of_weight(input.dtype, head.accumulate_dtype)
    grad_weight, grad_bias = head_gradients(head.weight.detach(), head.weight.shape, output_mask[1:], sum_dtype)
    columns = head.columns()
    grad_inputs: list[Tensor] = []
    # ``after`` keeps the order of the loop in a graph. What a function computes of two chunks' rows may be fused where
    # both read one tensor, a divisor for example: then the logits of all chunks would have to be there before the first
    # gradient (of 8192 x 4096 x 128256 3026 MiB, not 1568, 2026-11-25).
    overlaps, done = ranks.world > 1, None
    chunk = begin(0, None)
    for i in range(len(chunk_inputs)):
        x, part, logits, _, gathered = chunk
        del chunk  # which holds the logits
        after = None
        if overlaps and i + 1 < len(chunk_inputs):
            chunk = begin(i + 1, done)
            after = chunk.statistics
        results = steps.end(logits, part, gathered, output_mask, counts[i], after)
        if results is not None:
            grad_input, done = results
            if output_mask[0]:
                grad_inputs.append(ranks.sum(grad_input, scattered) if sum_over_ranks else grad_input)
            if output_mask[1] or output_mask[2]:
                _ops.linear_cross_entropy_chunk_add_(grad_weight, grad_bias, logits[0], x, columns, i == 0, counts[i])
            del grad_input, results
        del logits
        if not overlaps and i + 1 < len(chunk_inputs):
            chunk = begin(i + 1, done)
    total = input.new_empty(0)
    if output_mask[0]:
        parts_of_total = [ranks.wait(part) for part in grad_inputs] if sum_over_ranks else grad_inputs
        total = (parts_of_total[0] if len(chunk_inputs) == 1 else torch.cat(parts_of_total)).view(input.shape)
    return Gradients(total, grad_weight, grad_bias)


def _ends(number: int, parts: int, rows: Tensor, head: HeadSlice, world: int) -> list[int]:
    """Where chunks begin and end, as even as they get, from what is the same on every rank: all loop as often.

    Small local logits are one chunk: all local logits at once, unfused, would be 2 % faster (two H200s,
    8192 x 4096 x 32064; docs/lab/2026-11-linear.md).
    """
    num_classes = head.weight.shape[0] if head.shard_range[1] is None else head.shard_range[1]
    share, chunking = -(-num_classes // world), head.chunking
    size = rows_of_chunk(parts * number, rows, share, False, chunking.chunk_rows, chunking.logits_dtype)
    count = max(-(-(parts * number) // size), 1)
    return [number * i // count for i in range(count + 1)]


def wanted_gradients(input: Tensor, head: HeadSlice) -> list[bool]:
    enabled = torch.is_grad_enabled()
    return [enabled and tensor is not None and tensor.requires_grad for tensor in (input, head.weight, head.bias)]


def value(value: Tensor, input: Tensor, head: HeadSlice, grads: Gradients, divisor: Tensor | None) -> Tensor:
    """The loss, whose derivatives are these gradients divided by the divisor, once."""
    gradient_args: tuple[Any, ...] = (input, head.weight, head.bias, *grads, divisor)
    return _ops.attach_gradients(value, *gradient_args)
