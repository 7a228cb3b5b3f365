"""Launchers of the operators of a vocabulary split over ranks. See launch.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .. import reference_shard
from ..reference import accumulator
from ..rows import class_weight, dense, rows
from . import configs, launch
from .shard import join_kernel, shard_kernel

JOIN_BLOCK = 128  # rows; a program reads 3 or 4 numbers of each from every rank


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
    out = logits.new_empty((1, width), dtype=accumulator(logits))
    config = configs.forward(columns, logits.element_size())
    if view.number > 0:  # without rows nobody looks at the header
        with launch._on(logits):
            shard_kernel[(view.number,)](
                view.tensor,
                dense(target),
                class_weight(weight, out),
                out,
                columns,
                class_start,
                num_classes,
                view.inner,
                view.outer_stride,
                view.stride,
                label_smoothing,
                softcap or 0.0,
                logit_scale,
                HAS_WEIGHT=weight is not None,
                HAS_SMOOTHING=label_smoothing > 0.0,
                SOFTCAP=configs.softcap(softcap, logits.element_size()),
                EDGES=not launch._aligned(view, columns),
                BLOCK=config.block,
                VECTOR=configs.vector(logits.element_size()),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    return out


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
    loss, lse, target_weight, coefficient = (gathered.new_empty(target.shape) for _ in range(4))
    number, world = target.numel(), gathered.shape[0]
    if number > 0:
        with launch._on(logits):
            join_kernel[(triton.cdiv(number, JOIN_BLOCK),)](
                gathered.contiguous(),
                dense(target),
                loss,
                lse,
                target_weight,
                coefficient,
                world,
                number,
                num_classes,
                ignore_index,
                label_smoothing,
                HAS_WEIGHT=weight is not None,
                HAS_SMOOTHING=label_smoothing > 0.0,
                RANKS=triton.next_power_of_2(world),
                BLOCK=JOIN_BLOCK,
                num_warps=4,
                num_stages=1,
            )
    return loss, lse, target_weight, coefficient


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
        launch._backward(
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
    grad = logits.new_empty(logits.shape)
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
