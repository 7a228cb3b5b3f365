"""What each rank holds of the vocabulary, what all ranks hand over of their columns, and what a loss is divided by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.composite import Counts
from ..ops.eager import below
from .groups import Place


def chunk(num_classes: int, rank: int, world: int) -> tuple[int, int]:
    """(first class, number of classes) of a rank, as torch.chunk and DTensor's Shard cut a dimension."""
    size = -(-num_classes // world)
    start = min(rank * size, num_classes)
    return start, min(size, num_classes - start)


def first_class(width: int, class_start: int | None, num_classes: int, here: Place) -> int:
    """The first class of this rank's shard of ``width`` columns; an error for what this rank alone can see is wrong."""
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    if class_start is not None:
        return class_start  # the operator checks it
    if here.world > 1 and width >= num_classes > 1:
        raise ValueError(
            f"the shard has {width} columns, which is the whole vocabulary of num_classes={num_classes}: each of the "
            f"{here.world} ranks must pass its own columns only. Where one rank holds all of them, pass class_start"
        )
    start, size = chunk(num_classes, here.rank, here.world)
    # The last shard that is not empty may be padded to the others' size.
    if width != size and (size == 0 or width != -(-num_classes // here.world)):
        raise ValueError(
            f"the shard of rank {here.rank} has {width} columns; of num_classes={num_classes} over {here.world} ranks "
            f"DTensor's chunk rule gives it {size} (from class {start}). Pass class_start for any other split"
        )
    return start


def everyones_parts(
    kernels: Any,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    here: Place,
    start: int,
    num_classes: int,
    options: dict[str, Any],
    gather: Callable[[Tensor, Place], Tensor],
) -> Tensor:
    """(ranks, numbers), what ``xent::cross_entropy_shard`` returned on each rank: the one collective.

    Below autograd, which has nothing to do here: the gradient flows through the logits of the join. ``kernels`` are
    what ``kernels_for`` found for these arguments.
    """
    parts = kernels["cross_entropy_shard"](logits.detach(), target, start, num_classes, weight, **options)
    return gather(parts, here)


def traced_gather(parts: Tensor, here: Place) -> Tensor:
    """As nodes that tracers see, and passes move."""
    if here.world == 1:
        return parts
    collectives = torch.ops._c10d_functional
    everyones = below(collectives.all_gather_into_tensor.default, parts, here.world, here.name)
    return below(collectives.wait_tensor.default, everyones)


def counts_of(
    target_weight: Tensor, target: Tensor, *, ignore_index: int, lse_square_scale: float, reduction: str
) -> Counts:
    """As ops/composite.py counts rows, with the weight of each row's target in place of the class weights."""
    mean = reduction == "mean"
    weights = target_weight.sum() if mean else None
    if lse_square_scale == 0.0:
        return Counts(None, weights, weights)
    counted = target.to(torch.int64) != ignore_index
    return Counts(counted, counted.sum() if mean else None, weights)
