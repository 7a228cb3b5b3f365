"""Launchers of the operators of a vocabulary split over ranks. See launch.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference_shard
from ..reference import accumulator
from ..rows import dense, dense_like, dense_rows, rows, rows_like
from . import configs
from .cached import Bound, Launch, plan
from .common import (
    InTwoSteps,
    Strides,
    class_weights,
    copied_to_logits,
    edges,
    empty_like,
    into_empty,
    on_device_of,
    over_logits,
    place,
)
from .launch import prepare_backward
from .shard import join_shards_kernel, shard_kernel

JOIN_BLOCK = 128  # rows; a program reads 3 or 4 numbers of each from every rank
JOIN_PARTS = 1024  # programs whose sums are added at a time


@InTwoSteps
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
) -> Callable[..., Tensor]:
    columns = reference_shard.columns_of(logits, class_start, num_classes)
    view = rows(logits)
    number, strides, itemsize, weighted = view.number, view[2:], logits.element_size(), weight is not None
    width = reference_shard.width(number, weighted)
    empty, part = empty_like(logits), place((1, width), accumulator(logits))
    as_rows, as_targets = rows_like(logits, view), dense_like(target)
    shard = (columns, class_start, num_classes)
    launch = Bound(shard_launch(strides, shard, itemsize, weighted, False, label_smoothing, softcap, logit_scale))

    def parts(
        logits: Tensor,
        target: Tensor,
        class_start: int,
        num_classes: int,
        weight: Tensor | None = None,
        **_options: Any,
    ) -> Tensor:
        out = empty(*part)
        if number > 0:  # without rows nobody looks at the header
            weights = out
            if weight is not None:
                weights = class_weights(weight[:columns], out, label_smoothing, itemsize, strides)
            launch(number, as_rows(logits), as_targets(target), weights, out, out)
        return out

    return parts


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


@InTwoSteps
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
) -> Callable[..., tuple[Tensor, ...]]:
    number, world = target.numel(), gathered.shape[0]
    empty, row = empty_like(gathered), place(target.shape, gathered.dtype)
    as_targets, as_gathered = dense_like(target), dense_like(gathered)
    launch = Bound(join_launch(world, num_classes, weight is not None, "", ignore_index, label_smoothing))

    def join(logits: Tensor, target: Tensor, gathered: Tensor, *_rest: Any, **_options: Any) -> tuple[Tensor, ...]:
        outputs = (empty(*row), empty(*row), empty(*row), empty(*row))  # loss, lse, target_weight, coefficient
        if number > 0:
            launch(join_blocks(number), as_gathered(gathered), as_targets(target), *outputs, varying=(number,))
        return outputs

    return join


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
    out_strides: Strides,  # of what the gradient is written to
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
) -> Callable[..., Tensor]:
    """What writes the gradient to a tensor with such rows, which may be the logits, and returns it."""
    columns = reference_shard.columns_of(logits, class_start, num_classes)
    padded = columns < logits.shape[-1]
    if padded:
        logits = logits[..., :columns]
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    shard = (class_start, num_classes)
    write = prepare_backward(out_strides, grad_loss, grad_lse, logits, target, lse, weight, *options, shard=shard)

    def backward(
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
        **_options: Any,
    ) -> Tensor:
        classes, their_grad = logits, grad
        if padded:
            classes, their_grad = logits[..., :columns], grad[..., :columns]
            weight = None if weight is None else weight[:columns]
        write(their_grad, grad_loss, grad_lse, classes, target, lse, weight, coefficient=coefficient)
        if padded:
            grad[..., columns:].zero_()  # beyond the last class
        return grad

    return backward


@InTwoSteps
def cross_entropy_shard_backward(
    grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any, **options: Any
) -> Callable[..., Tensor]:
    write = _backward(dense_rows(logits.shape), grad_loss, grad_lse, logits, *rest, **options)
    return into_empty(logits, write)


@InTwoSteps
def cross_entropy_shard_backward_(
    grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any, **options: Any
) -> Callable[..., None]:
    view = rows(logits)
    if view.tensor is not logits:
        return copied_to_logits(cross_entropy_shard_backward)
    write = _backward(view[2:], grad_loss, grad_lse, logits, *rest, **options)
    return over_logits(write)
