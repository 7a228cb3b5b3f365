"""Linear cross entropy over ranks in three products: the loop of head/loop.py with collectives.

A chunk's statistics are gathered while the next chunk's product runs. The forward computes the gradients, and the
backward multiplies them by the upstream gradient, in place. With ``sequence_parallel`` each chunk's input is gathered
before its product, and the input's gradient is reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..head import float16, loop
from ..head.chunks import HeadGradients
from ..head.loop import HeadSlice, OneRank, RowGradients, RowRange
from ..head.products import concatenated
from ..head.shard import RowStatistics
from ..kernels import reductions, reference
from ..kernels.options import LossOptions
from ..linear_call import LinearCall
from ..ops import checks, rank_sums
from ..ops.linear import composite
from ..ops.linear.chunk import with_gradients
from ..ops.message_values import repr_for_message
from ..ops.reduction import divisors_of
from ..user_function import TokenRows
from .groups import Ranks
from .parts import all_reduce, by_ranks
from .sharded_rows import RowValues, reduced


class Collectives(OneRank):
    """Functional collectives of a group of ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.world, self.rank, self.name, self.in_rank_order = ranks.world, ranks.rank, ranks.name, ranks.in_rank_order

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor if self.world == 1 else rank_sums.gather(tensor, self.world, self.name)

    def add_up(self, gradient: Tensor, scattered: bool) -> Tensor:
        if self.world == 1:
            return gradient
        return rank_sums.start(gradient, self.world, self.name, scattered, self.in_rank_order)

    def wait(self, tensor: Tensor) -> Tensor:
        return tensor if self.world == 1 else rank_sums.wait(tensor)


def arrange(call: LinearCall, function: TokenRows, ranks: Ranks) -> Tensor:
    """Bring the function's rows into the order of the ranks' inputs. Returns the target in this order."""
    function.arrange(lambda row: by_ranks(row, call.sequence_dim, ranks))
    return by_ranks(call.target, call.sequence_dim, ranks)


def is_pipelined(asked: bool | None, input: Tensor, head: HeadSlice, loss: LossOptions) -> bool:
    """Does this file compute this call? All ranks return the same answer."""
    if not (asked is None or isinstance(asked, bool)):
        raise TypeError(f"pipelined must be True, False or None, got {repr_for_message(asked)}")
    chunking = head.chunking
    possible = loss.reduction != "none" and not chunking.skip_ignored and chunking.products is None
    if asked and not possible:
        raise ValueError(
            'pipelined=True makes the gradients of a mean or a sum of all rows: expected reduction="mean" or "sum", '
            "without skip_ignored and products"
        )
    return asked is not False and possible and composite.gradients_in_forward(input, head.weight, head.bias)


def pipelined_loss(call: LinearCall, ranks: Ranks) -> tuple[Tensor, list[RowValues]]:
    """(the mean or the sum, constant values of each chunk's rows). Input, weight or bias requires grad."""
    input, head, options, divisor, split_dim = call.input, call.head, call.loss, call.divisor, call.sequence_dim
    target, token_weight = by_ranks(call.target, split_dim, ranks), by_ranks(call.token_weight, split_dim, ranks)
    checks.constant("divisor", divisor)
    dtype = reference.accumulator(input)
    class_weights = None if head.class_weight is None else _class_weights(target, head, options, dtype)
    if class_weights is None or options.reduction != "mean":
        divisors = divisors_of(target, None, token_weight, divisor, options, dtype)
    else:
        divisors = reductions.divisor_of(class_weights, target, options.row_options.ignore_index, token_weight)
        if ranks.world > 1:  # each has the weights of its own classes, and the number of all rows
            divisors = torch.stack([all_reduce(divisors[0], ranks), divisors[1]])
    row_weight = None
    if class_weights is not None and input.dtype == torch.float16:
        row_weight = _summed_class_weights(class_weights, head, ranks, options)
    split = float16.split_loss(input.dtype, divisors, target, token_weight, loss=options, row_weight=row_weight)
    loop_args = (input, target, token_weight, head, options, ranks, split, loop.wanted_gradients(input, head))
    row_values, chunk_args, gradients = rows_and_gradients(*loop_args, scattered=split_dim is not None)
    all_rows = RowValues(*(concatenated(values) for values in zip(*row_values, strict=True)))
    targets, *weights = (concatenated(values) for values in zip(*chunk_args, strict=True))
    value = reduced(all_rows, targets, options, divisor, *weights)
    return with_gradients(value, input, head, gradients, split, None if split_dim is None else ranks.rank), row_values


def rows_and_gradients(
    input: Tensor,
    target: Tensor,  # in the order of the ranks' inputs
    token_weight: Tensor | None,
    head: HeadSlice,
    options: LossOptions,
    ranks: Ranks,
    split: float16.Split,
    output_mask: Sequence[bool],
    *,
    scattered: bool = False,
    sum_over_ranks: bool = True,
) -> tuple[list[RowValues], list[tuple[Tensor, ...]], HeadGradients]:
    """(values of each chunk's rows, their targets and token weights if there are some, gradients of all rows).

    ``output_mask``, ``scattered``, ``sum_over_ranks``: as in head/loop.py.
    """
    parts = ranks.world if scattered else 1
    one, dtype = split.divisors.new_ones(()), split.divisors.dtype
    token_weight, weights_of_chunks, shares = (
        None if rows is None else rows.to(dtype).reshape(parts, -1)
        for rows in (token_weight, None if split.shares is None else split.token_weight, split.shares)
    )
    row_values: list[RowValues] = []
    chunk_args: list[tuple[Tensor, ...]] = []

    def upstream(rows: RowStatistics, part: RowRange) -> RowGradients:
        factors = () if token_weight is None else (part.of(token_weight),)
        assert rows.target_weight is not None  # shard_range has the number of classes
        row_values.append(RowValues(rows.loss, rows.lse, rows.target_weight))
        chunk_args.append((part.target, *factors))
        if weights_of_chunks is not None:
            return RowGradients(part.of(weights_of_chunks), divisors=split.divisors)
        return RowGradients(*(factors or (one,)), divisors=split.divisors)

    collectives = Collectives(ranks)
    steps = loop.CrossEntropySteps(head, options, upstream, collectives)
    loop_args = (steps, (input,), target, head, collectives, output_mask)
    layout: dict[str, Any] = {"scattered": scattered, "sum_over_ranks": sum_over_ranks, "shares": shares}
    return row_values, chunk_args, loop.run_loop(*loop_args, options.row_options.ignore_index, **layout)


def _class_weights(target: Tensor, head: HeadSlice, options: LossOptions, dtype: torch.dtype) -> Tensor:
    """Of the target's shape: the class weights of targets that this rank holds, 0 for the others."""
    assert head.class_weight is not None
    columns = head.columns()
    column = target.to(torch.int64) - head.shard_range[0]
    is_here = (column >= 0) & (column < columns) & reference.is_counted(target, options.row_options.ignore_index)
    if columns == 0:
        return torch.zeros_like(target, dtype=dtype)
    return torch.where(is_here, head.class_weight.to(dtype)[torch.where(is_here, column, 0)], 0.0)


def _summed_class_weights(class_weights: Tensor, head: HeadSlice, ranks: Ranks, options: LossOptions) -> Tensor:
    """The magnitudes of all targets' class weights, as in float16.magnitudes: one sum over the ranks."""
    assert head.class_weight is not None
    own, columns = class_weights.abs().reshape(-1), head.columns()
    weights = torch.cat([own, head.class_weight[:columns].to(own.dtype).abs().sum().view(1)])
    weights = all_reduce(weights, ranks, ranks.in_rank_order)
    rows = weights[:-1].view(class_weights.shape)
    smoothing, number = options.row_options.label_smoothing, head.shard_range[1]
    mean = weights[-1] / (columns if number is None else number)
    return torch.lerp(rows, mean, smoothing) if smoothing > 0.0 else rows
