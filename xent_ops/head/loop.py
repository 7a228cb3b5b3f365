"""The loop over chunks of rows for losses that run the caller's code between a chunk's statistics and its gradient.

The caller's code is the all-gather over ranks, a user's function, or both. So tracers must see the loop, and its steps
are operators (ops/linear/chunk.py). A loop without the caller's code stays inside one operator: products.py. The device
and the ranks work in this order::

    logits of chunk 0, its statistics
    all-gather of the statistics of 0
    logits of 1, its statistics
    gradient over the logits of 0, its product with the head
    sum over ranks of the input's gradient of 0
    product for the weight's gradient of 0                    the logits of 0 are gone
    ...

A collective runs in parallel with the lines below it. Two chunks of logits exist at a time; on one rank, one does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.options import DEFAULT_CHUNKING, Chunking, LossOptions
from ..kernels.reference import columns_of
from ..kernels.rows import first_columns
from . import shard
from .chunks import HeadGradients, as_rows, classes_of
from .ids import token_logits_backward
from .packing import as_index, filled_up, whole_chunk
from .products import InPlace, accumulator_of_weight, concatenated, head_gradients
from .shard import RowStatistics
from .sizes import rows_of_chunk, rows_of_one_shape

_ops = torch.ops.xent


class HeadSlice(NamedTuple):
    """The rows of the head that a rank holds, and the options of its chunks."""

    weight: Tensor  # (classes, H)
    bias: Tensor | None  # (classes,)
    class_weight: Tensor | None  # (classes,)
    shard_range: tuple[int, Any] = (0, None)  # class_start, num_classes; None: this slice has all classes
    accumulate_dtype: torch.dtype | None = None
    chunking: Chunking = DEFAULT_CHUNKING

    def columns(self) -> int:
        """The number of rows that are classes. The rows behind them are padding."""
        return columns_of(self.weight.shape[0], *self.shard_range)


class OneRank:
    """Collectives for one rank, which do nothing. With several ranks they run until ``wait``: pipelined.py."""

    world, rank, in_rank_order = 1, 0, False

    def gather(self, tensor: Any) -> Any:
        return tensor

    def add_up(self, gradient: Tensor, scattered: bool) -> Tensor:
        """The sum over the ranks, or with ``scattered`` this rank's part of it."""
        return gradient

    def wait(self, tensor: Any) -> Any:
        return tensor


class RowGradients(NamedTuple):
    """Upstream gradients of a chunk's rows for ``cross_entropy_backward``: (n,), or () for all rows."""

    grad_loss: Tensor  # not read beside grad_ids
    grad_lse: Tensor | None = None
    grad_entropy: Tensor | None = None
    divisors: Tensor | None = None  # (2,): grad_loss and the gradient of the z-loss are divided by them
    grad_ids: Tensor | None = None  # (n, K)


class RowRange(NamedTuple):
    """The rows of a chunk. It has rows ``start`` to ``stop`` of each rank's input, rank after rank."""

    start: int  # not a slice: Dynamo would specialise its ends
    stop: int
    target: Tensor  # (n,)
    ids: Tensor | None = None  # (n, K)
    added: int = 0  # rows that fill up each rank's part
    counted: Tensor | None = None  # (): the number of counted rows, which come first

    def of(self, values: Tensor, fill: int = 0) -> Tensor:
        """(ranks, N, ...) to (n, ...)."""
        number = values.shape[1]
        if not (type(number) is type(self.stop) is int and self.start == 0 and self.stop == number):
            values = values[:, self.start : self.stop]
        return filled_up(values, self.added, fill, dim=1).flatten(0, 1)


ChunkLogits = tuple[Tensor, ...]  # one tensor per head; a chunk keeps them from its first product to its last


class Steps(Protocol):
    """The work of a loss on a chunk of rows before its statistics are gathered, and after that."""

    def begin(self, inputs: Sequence[Tensor], part: RowRange, after: Tensor | None) -> tuple[Any, ChunkLogits]:
        """(statistics, logits). ``inputs``: for each input of the loop, the chunk's rows (n, H)."""

    def end(
        self,
        chunk_logits: ChunkLogits,
        part: RowRange,
        gathered: Any,  # the statistics of all ranks
        output_mask: Sequence[bool],  # the gradients that are wanted
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """(gradient of the input, done). The logits' gradient is written over them. None: no gradient is wanted."""


Upstream = Callable[[RowStatistics, RowRange], RowGradients]


class CrossEntropySteps:
    """Statistics and gradient of rows of logits, with the caller's function between them."""

    def __init__(
        self,
        head: HeadSlice,
        loss: LossOptions,
        upstream: Upstream,
        ranks: OneRank,
        with_entropy: bool = False,
        mask_ids: bool = False,  # lse is over the classes that no id of the row names
    ) -> None:
        bias = None if head.bias is None else head.bias.detach()
        self.weight, self.bias, self.class_weight, _ = classes_of(
            head.weight.detach(), bias, head.class_weight, *head.shard_range
        )
        self.head, self.loss, self.upstream, self.ranks, self.with_entropy = head, loss, upstream, ranks, with_entropy
        self.columns, self.mask_ids = self.weight.shape[0], mask_ids

    def begin(self, inputs: Sequence[Tensor], part: RowRange, after: Tensor | None) -> tuple[Any, ChunkLogits]:
        dtype = self.head.chunking.logits_dtype
        logits = _ops.linear_logits(inputs[0], self.weight, self.bias, part.counted, after, dtype)
        row_args = (first_columns(logits, self.columns), part.target, part.ids, self.head.shard_range)
        flags = (self.with_entropy, self.mask_ids)
        return shard.statistics_of_chunk(*row_args, self.class_weight, *flags, self.loss.row_options), (logits,)

    def end(
        self,
        chunk_logits: ChunkLogits,
        part: RowRange,
        gathered: Any,
        output_mask: Sequence[bool],
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        (all_logits,), shard_range, weight, rows = chunk_logits, self.head.shard_range, self.class_weight, gathered
        logits, options = first_columns(all_logits, self.columns), self.loss.row_options
        if shard_range[1] is not None:
            ids_per_row = 0 if part.ids is None else part.ids.shape[1]
            join_args = (weight, self.with_entropy, options, ids_per_row, self.ranks.in_rank_order)
            rows = shard.join_statistics(gathered, logits, part.target, shard_range, *join_args)
        grads = self.upstream(rows, part)
        if not any(output_mask):
            return None
        dtype = None if logits.dtype == self.weight.dtype else self.weight.dtype
        row_args = {"logits": logits, "target": part.target, "lse": rows.lse, "lse_low": rows.lse_low}
        row_args |= {"grad_lse": grads.grad_lse, "grad_entropy": grads.grad_entropy}
        row_args["entropy"] = None if grads.grad_entropy is None else rows.entropy
        row_args |= {"class_start": shard_range[0], "num_classes": shard_range[1], "grad_dtype": dtype}
        if grads.grad_ids is not None:
            ids_args = {"grad_ids": grads.grad_ids, "ids": part.ids, "at_ids": rows.at_ids, "mask_ids": self.mask_ids}
            token_logits_backward(**ids_args, **row_args, options=options, writer=InPlace())
        else:
            row_args |= {"grad_loss": grads.grad_loss, "divisors": grads.divisors, "weight": weight}
            row_args["lse_coefficient"] = None if weight is None else rows.lse_coefficient
            _ops.cross_entropy_backward_(**row_args, **self.loss.backward_keywords())
        return _ops.linear_grad_input(all_logits, self.weight, output_mask[0], part.counted, after)


class _PendingChunk(NamedTuple):
    """A chunk after its first product. ``gathered`` may be in flight: call ``wait`` before reading it."""

    input: Tensor  # (n, H)
    part: RowRange
    logits: ChunkLogits
    statistics: Any  # over ranks a tensor
    gathered: Any


def run_loop(
    steps: Steps,
    inputs: Sequence[Tensor],  # (..., H) of this rank: the first gets gradients, others have the same rows
    target: Tensor,  # of all rows: (...), or with ``scattered`` (ranks, ...)
    head: HeadSlice,
    ranks: OneRank,
    output_mask: Sequence[bool],  # the gradients that are wanted
    ignore_index: int,
    *,
    count: Tensor | None = None,  # (): the number of counted rows, which come first
    scattered: bool = False,  # the inputs have this rank's part of the rows
    sum_over_ranks: bool = True,  # else the input's gradient is this rank's part of the sum
    ids: Tensor | None = None,  # several classes per row, (parts, N, K), in the order of the targets
    shares: Tensor | None = None,  # (parts, N): factors of rows in the gradients of the weight and the bias
) -> HeadGradients:
    """The loop over chunks. Gradients of the weight and the bias are sums, in the dtype in which they were added up."""
    input, parts = inputs[0], ranks.world if scattered else 1
    flat, targets = [as_rows(rows.detach()) for rows in inputs], target.reshape(parts, -1)
    number = targets.shape[1]
    ends, size = _ends(number, parts, flat, head, ranks.world)
    chunk_inputs = [flat]
    if len(ends) > 2:
        chunk_inputs = [[rows[start:end] for rows in flat] for start, end in itertools.pairwise(ends)]
    if size is not None:  # batch_invariant=True
        chunk_inputs = [[whole_chunk(part, size) for part in inputs_of_one] for inputs_of_one in chunk_inputs]
        targets, ids = as_index(targets), None if ids is None else as_index(ids)
    if scattered:
        chunk_inputs = [[ranks.gather(part.contiguous()) for part in inputs_of_one] for inputs_of_one in chunk_inputs]

    def begin(i: int, after: Tensor | None) -> _PendingChunk:
        inputs_of_chunk = [ranks.wait(part) for part in chunk_inputs[i]] if scattered else chunk_inputs[i]
        start, stop = ends[i], ends[i + 1]
        part = RowRange(start, stop, target, added=0 if size is None else size - (stop - start))
        part = part._replace(target=part.of(targets, ignore_index))
        part = part if ids is None else part._replace(ids=part.of(ids, ignore_index))
        if count is not None:
            part = part._replace(counted=(count - start).clamp(0, stop - start).to(torch.int32))
        statistics, logits = steps.begin(inputs_of_chunk, part, after)
        return _PendingChunk(inputs_of_chunk[0], part, logits, statistics, ranks.gather(statistics))

    sum_dtype = accumulator_of_weight(input.dtype, head.accumulate_dtype)
    grad_weight, grad_bias = head_gradients(head.weight, head.weight.shape, output_mask[1:], sum_dtype)
    columns = head.columns()
    grad_inputs: list[Tensor] = []
    # ``after`` keeps the order of the loop in a graph. A compiler may fuse a function's work on two chunks if both read
    # one tensor, such as a divisor. Then the logits of all chunks would exist before the first gradient
    # (8192 x 4096 x 128256: 3026 MiB, not 1568, 2026-11-25).
    overlaps, done = ranks.world > 1, None
    chunk = begin(0, None)
    for i in range(len(chunk_inputs)):
        x, part, logits, _, gathered = chunk
        del chunk  # it holds the logits
        after = None
        if overlaps and i + 1 < len(chunk_inputs):
            chunk = begin(i + 1, done)
            after = chunk.statistics
        results = steps.end(logits, part, ranks.wait(gathered), output_mask, after)
        if results is not None:
            grad_input, done = results
            if output_mask[0]:
                grad_inputs.append(ranks.add_up(grad_input, scattered) if sum_over_ranks else grad_input)
            if output_mask[1] or output_mask[2]:
                chunk_args = (columns, i == 0, part.counted, None if shares is None else part.of(shares))
                _ops.linear_cross_entropy_chunk_add_(grad_weight, grad_bias, logits[0], x, *chunk_args)
            del grad_input, results
        del logits
        if not overlaps and i + 1 < len(chunk_inputs):
            chunk = begin(i + 1, done)
    if not output_mask[0]:
        return HeadGradients(input.new_empty(0), grad_weight, grad_bias)
    total = concatenated([ranks.wait(part) for part in grad_inputs] if sum_over_ranks else grad_inputs)
    return HeadGradients((total if size is None else total[:number]).view(input.shape), grad_weight, grad_bias)


def _ends(
    number: int, parts: int, inputs: Sequence[Tensor], head: HeadSlice, world: int
) -> tuple[list[int], int | None]:
    """(the ends of the chunks, as even as possible; with batch_invariant the rows of each chunk of a part, else None).

    They depend only on values that all ranks share. Small local logits are one chunk.
    """
    num_classes = head.weight.shape[0] if head.shard_range[1] is None else head.shard_range[1]
    share, chunking, rows = -(-num_classes // world), head.chunking, inputs[0]
    if chunking.batch_invariant:
        size = rows_of_one_shape(rows, share, chunking.chunk_rows, chunking.logits_dtype, parts)
        return [*range(0, max(number, 1), size), number], size
    size_args = (chunking.chunk_rows, chunking.logits_dtype, len(inputs))
    size = rows_of_chunk(parts * number, rows, share, False, *size_args)
    count = int(max(-(-(parts * number) // size), 1))  # a symbol would stay in the ends, of which the last is number
    if count == 2 and world > 1 and chunking.chunk_rows is None:
        count = 1  # both would be in memory at once. One is 1.3 % faster: four H200s, 8192 x 4096 x 32064, 2026-11
    return [number * i // count for i in range(count + 1)], None


def wanted_gradients(input: Tensor, head: HeadSlice) -> list[bool]:
    enabled = torch.is_grad_enabled()
    return [enabled and tensor is not None and tensor.requires_grad for tensor in (input, head.weight, head.bias)]
