"""The part of the vocabulary and of the rows that each rank holds, and collectives that are awaited at once."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels.options import RowOptions
from ..ops import rank_sums, scalars
from ..ops.library import below_autograd
from .groups import Ranks

_Rows = TypeVar("_Rows", Tensor, Tensor | None)


def share_of_rank(num_classes: int, rank: int, world: int) -> tuple[int, int]:
    """(first class, number of classes) of a rank, as torch.chunk and DTensor's Shard cut a dimension."""
    size = -(-num_classes // world)
    start = min(rank * size, num_classes)
    return start, min(size, num_classes - start)


def shard_range(width: int, num_classes: Any, class_start: Any, ranks: Ranks) -> tuple[int, int]:
    """(class_start, num_classes) of this rank's ``width`` columns. Raises the errors that it can detect alone."""
    class_start = None if class_start is None else scalars.integer("class_start", class_start)
    num_classes = scalars.at_least_one("num_classes", num_classes)
    if class_start is not None:
        return class_start, num_classes  # the operator checks the start
    if ranks.world > 1 and width >= num_classes > 1:
        raise ValueError(
            f"the shard has {width} columns, which is the whole vocabulary of num_classes={num_classes}: each of the "
            f"{ranks.world} ranks must pass its own columns only. Where one rank holds all of them, pass class_start"
        )
    start, size = share_of_rank(num_classes, ranks.rank, ranks.world)
    # The last shard that is not empty may be padded to the others' size.
    if width != size and (size == 0 or width != -(-num_classes // ranks.world)):
        raise ValueError(
            f"the shard of rank {ranks.rank} has {width} columns; of num_classes={num_classes} over {ranks.world} "
            f"ranks DTensor's chunk rule gives it {size} (from class {start}). Pass class_start for any other split"
        )
    return start, num_classes


def all_gather_shard_stats(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ranks: Ranks,
    shard_range: tuple[int, int],
    options: RowOptions,
) -> Tensor:
    """(ranks, numbers), the results of ``xent::cross_entropy_shard`` on all ranks: the one collective of a loss.

    It runs without autograd, because the gradient flows through the logits of the operator that joins.
    """
    shard_args = (logits.detach(), target, *shard_range, weight, ranks.batch_invariant)
    statistics = below_autograd(torch.ops.xent.cross_entropy_shard.default, *shard_args, **options.keywords())
    return all_gather(statistics, ranks)


def all_gather(tensor: Tensor, ranks: Ranks) -> Tensor:
    """(ranks * n, ...) of each rank's (n, ...), without a gradient."""
    if ranks.world == 1:
        return tensor
    collectives = torch.ops._c10d_functional
    gathered = below_autograd(collectives.all_gather_into_tensor.default, tensor, ranks.world, ranks.name)
    return below_autograd(collectives.wait_tensor.default, gathered)


def all_reduce(tensor: Tensor, ranks: Ranks, in_rank_order: bool = False) -> Tensor:
    """The sum over the ranks. In eager it may be written over the tensor."""
    if ranks.world == 1:
        return tensor
    return rank_sums.wait(rank_sums.start(tensor, ranks.world, ranks.name, False, in_rank_order))


def by_ranks(rows: _Rows, split: int | None, ranks: Ranks) -> _Rows:
    """Rows of the target in the order of the ranks' inputs, (ranks, ...). Without a split: unchanged."""
    if rows is None or split is None:
        return rows
    return rows.unflatten(split, (ranks.world, -1)).movedim(split, 0).contiguous()


def as_target(value: Tensor, split: int | None) -> Tensor:
    """The inverse of ``by_ranks``, for values of shape (ranks, ...), one for each row."""
    return value if split is None else value.movedim(0, split).flatten(split, split + 1)
