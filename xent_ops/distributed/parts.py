"""The shard of the vocabulary that each rank holds, and the all-gather of the shards' statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.options import RowOptions
from ..ops import scalars
from ..ops.dtensors import refuse_dtensor
from ..ops.library import below_autograd
from .groups import Ranks


def share_of_rank(num_classes: int, rank: int, world: int) -> tuple[int, int]:
    """(first class, number of classes) of a rank, as torch.chunk and DTensor's Shard cut a dimension."""
    size = -(-num_classes // world)
    start = min(rank * size, num_classes)
    return start, min(size, num_classes - start)


def first_class(width: int, class_start: int | None, num_classes: int, ranks: Ranks) -> int:
    """The first class of this rank's shard of ``width`` columns."""
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    if class_start is not None:
        return class_start  # the operator checks it
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
    return start


def shard_range_of(logits: Tensor, num_classes: Any, class_start: Any, ranks: Ranks) -> tuple[int, int]:
    """(class_start, num_classes) of this rank's columns. Raises the errors that this rank can detect alone."""
    refuse_dtensor("logits_shard", logits, "xent_ops.cross_entropy")
    if logits.dim() < 1:
        raise ValueError("logits_shard has no dimension; expected (..., columns of this rank)")
    return shard_range_of_width(logits.shape[-1], num_classes, class_start, ranks)


def shard_range_of_width(width: int, num_classes: Any, class_start: Any, ranks: Ranks) -> tuple[int, int]:
    start = None if class_start is None else scalars.integer("class_start", class_start)
    num_classes = scalars.integer("num_classes", num_classes)
    return first_class(width, start, num_classes, ranks), num_classes


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
    """(ranks * n, ...) of each rank's (n, ...), without a gradient.

    Functional collectives are nodes that tracers see and passes move.
    """
    if ranks.world == 1:
        return tensor
    collectives = torch.ops._c10d_functional
    gathered = below_autograd(collectives.all_gather_into_tensor.default, tensor, ranks.world, ranks.name)
    return below_autograd(collectives.wait_tensor.default, gathered)
