"""Launchers of the operators of a vocabulary split over ranks. See launch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference_shard
from ..reference import accumulator
from ..rows import dense, rows
from . import configs, launch
from .cached import Launch, plan
from .common import Strides, class_weights, edges, empty_grad, on_device_of
from .shard import join_shards_kernel, shard_kernel

JOIN_BLOCK = 128  # rows; a program reads 3 or 4 numbers of each from every rank
JOIN_PARTS = 1024  # programs whose sums are added at a time


def cross_entropy_shard(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    columns = reference_shard.columns_of(logits, class_start, num_classes)
    view = rows(logits)
    width = reference_shard.width(view.number, weight is not None)
    out = torch.empty((1, width), dtype=accumulator(logits), device=logits.device)
    if view.number > 0:  # without rows nobody looks at the header
        options = (label_smoothing, softcap, logit_scale)
        place = (columns, class_start, num_classes)
        prepared = shard_launch(view[2:], place, logits.element_size(), weight is not None, False, *options)
        with on_device_of(logits):
            weights = None if weight is None else weight[:columns]
            weights = class_weights(weights, out, label_smoothing, logits.element_size(), view[2:])
            prepared(view.number, view.tensor, dense(target), weights, out, out)
    return out


@plan
def shard_launch(
    strides: Strides,
    place: tuple[int, int, int],  # columns, class_start, num_classes
    itemsize: int,
    weighted: bool,
    with_counter: bool,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> Launch:
    load = configs.load(softcap, weighted, label_smoothing)
    config = configs.forward(place[0], itemsize, load > 0, load)
    return Launch(
        shard_kernel,
        *place,
        *strides,
        label_smoothing,
        softcap or 0.0,
        logit_scale,
        HAS_WEIGHT=weighted,
        HAS_SMOOTHING=label_smoothing > 0.0,
        SOFTCAP=configs.softcap(softcap, itemsize),
        HAS_COUNTER=with_counter,
        EDGES=edges(place[0], itemsize, strides),
        BLOCK=config.block,
        VECTOR=configs.vector(itemsize),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def cross_entropy_shard_join(
    logits: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = torch.empty(target.shape, dtype=gathered.dtype, device=gathered.device)
    lse, target_weight, coefficient = (torch.empty_like(loss) for _ in range(3))
    number, world = target.numel(), gathered.shape[0]
    if number > 0:
        prepared = join_launch(world, num_classes, weight is not None, "", ignore_index, label_smoothing)
        outputs = (loss, lse, target_weight, coefficient)
        with on_device_of(logits):
            prepared(join_blocks(number), gathered.contiguous(), dense(target), *outputs, varying=(number,))
    return loss, lse, target_weight, coefficient


def join_and_reduce(
    target: Tensor,
    gathered: Tensor,  # contiguous; not of any use afterwards
    num_classes: int,
    mean: bool,  # or the sum
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    **_rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, number of counted rows, lse) of rows without class weights. What PreparedShard does, in the same order.

    So all ranks get the same bits, also where one of them has prepared its loss and another one could not.
    """
    number, reduction = target.numel(), "mean" if mean else "sum"
    lse = torch.empty(target.shape, dtype=gathered.dtype, device=gathered.device)
    loss, counted = lse.new_empty(()), lse.new_zeros(())
    prepared = join_launch(gathered.shape[0], num_classes, False, reduction, ignore_index, label_smoothing)
    with on_device_of(target):
        prepared(join_blocks(number), gathered, dense(target), loss, lse, counted, lse, varying=(number,))
    return loss, counted, lse


def join_blocks(rows: int) -> int:
    """Programs that share the rows."""
    return -(-rows // JOIN_BLOCK)


@plan
def join_launch(
    world: int, num_classes: int, weighted: bool, reduction: str, ignore_index: int, label_smoothing: float
) -> Launch:
    return Launch(
        join_shards_kernel,
        world,
        num_classes,
        ignore_index,
        label_smoothing,
        varying=1,
        HAS_WEIGHT=weighted,
        HAS_SMOOTHING=label_smoothing > 0.0,
        REDUCTION=reduction,
        RANKS=configs.power_of_two(world),
        BLOCK=JOIN_BLOCK,
        PARTS=JOIN_PARTS,
        num_warps=4,
        num_stages=1,
    )


def _backward(
    grad: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    coefficient: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> None:
    """Into ``grad``, which may be the logits."""
    columns = reference_shard.columns_of(logits, class_start, num_classes)
    if columns > 0:
        launch.run_backward(
            grad[..., :columns],
            grad_loss,
            grad_lse,
            logits[..., :columns],
            target,
            lse,
            None if weight is None else weight[:columns],
            ignore_index,
            label_smoothing,
            softcap,
            logit_scale,
            shard=launch.Shard(class_start, num_classes, coefficient),
        )
    if columns < logits.shape[-1]:
        grad[..., columns:].zero_()  # padding beyond the last class


def cross_entropy_shard_backward(
    grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any, **options: Any
) -> Tensor:
    grad = empty_grad(logits)
    _backward(grad, grad_loss, grad_lse, logits, *rest, **options)
    return grad


def cross_entropy_shard_backward_(
    grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any, **options: Any
) -> None:
    if rows(logits).tensor is logits:
        _backward(logits, grad_loss, grad_lse, logits, *rest, **options)
        torch.autograd.graph.increment_version(logits)  # a launch is not seen by autograd
    else:  # rows that no two strides describe: through a dense gradient
        logits.copy_(cross_entropy_shard_backward(grad_loss, grad_lse, logits, *rest, **options))
