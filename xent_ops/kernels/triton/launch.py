"""From tensors to kernels: allocate, take strides, pick a config. One function an operator, named as it is.

Arguments have passed the operators' checks. Nothing here synchronises, and all that is allocated is an output or
a handful of numbers, so that every launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference import accumulator
from ..rows import Rows, class_weight, dense, per_row, rows
from . import configs
from .backward import backward_kernel
from .cached import launch
from .forward import forward_kernel, join_kernel, partial_kernel
from .short import short_kernel
from .soft import soft_backward_kernel, soft_forward_kernel


class Shard(NamedTuple):
    """Where a rank's logits lie in a vocabulary split over ranks."""

    class_start: int
    num_classes: int
    coefficient: Tensor | None  # see reference_shard.py


def _aligned(view: Rows, classes: int) -> bool:
    """Does every row start and end on a 16-byte boundary, counted from the first?"""
    vector = configs.vector(view.tensor.element_size())
    return not (classes % vector or view.outer_stride % vector or view.stride % vector)


def _empty_rows(logits: Tensor) -> Tensor:
    """One value a row. torch.empty costs half of what new_empty does."""
    return torch.empty(logits.shape[:-1], dtype=accumulator(logits), device=logits.device)


def _empty_grad(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@functools.cache
def _processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _processors(tensor: Tensor) -> int:
    """Streaming multiprocessors of the tensor's device; 2 in the interpreter, so that both ways are run there."""
    return _processors_of(tensor.device) if tensor.is_cuda else 2


_HERE = contextlib.nullcontext()


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE


def _forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    with_argmax: bool = False,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    classes = logits.shape[-1]
    loss = _empty_rows(logits)
    lse = torch.empty_like(loss)
    argmax = torch.empty_like(loss, dtype=torch.int64) if with_argmax else lse
    entropy = torch.empty_like(loss) if with_entropy else lse
    view = rows(logits)
    if view.number == 0:
        return loss, lse, argmax, entropy
    itemsize = logits.element_size()
    extra = with_argmax or with_entropy
    heavy = softcap is not None or (weight is not None and label_smoothing > 0.0)
    config = configs.forward(classes, itemsize, extra, heavy)
    config, parts, part_classes = configs.parts(view.number, classes, config, _processors(logits))
    short = configs.short(classes, itemsize, extra) if _aligned(view, classes) else None
    shared: dict[str, Any] = {
        "HAS_WEIGHT": weight is not None,
        "HAS_SMOOTHING": label_smoothing > 0.0,
        "SOFTCAP": configs.softcap(softcap, logits.element_size()),
        "HAS_ARGMAX": with_argmax,
        "HAS_ENTROPY": with_entropy,
    }
    tiling: dict[str, Any] = {
        "EDGES": not _aligned(view, classes),
        "BLOCK": config.block,
        "VECTOR": configs.vector(itemsize),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    inputs = (view.tensor, dense(target), class_weight(weight, lse))
    outputs = (loss, lse, argmax, entropy)
    options = (ignore_index, label_smoothing, softcap or 0.0, logit_scale)
    with _on(logits):
        if short is not None:
            launch(short_kernel, -(-view.number // short.rows))(
                *inputs, *outputs, view.number, classes, *view[2:], *options,
                ROWS=short.rows, BLOCK=short.block, VECTOR=configs.vector(itemsize), num_warps=short.num_warps,
                num_stages=1, **shared,
            )  # fmt: skip
        elif parts == 1:
            launch(forward_kernel, view.number)(*inputs, *outputs, classes, *view[2:], *options, **shared, **tiling)
        else:
            sums = torch.empty((view.number, 6, parts), dtype=lse.dtype, device=lse.device)
            first = torch.empty((view.number, parts), dtype=torch.int32, device=lse.device) if with_argmax else sums
            launch(partial_kernel, view.number * parts)(
                *inputs, sums, first, classes, part_classes, parts, *view[2:], *options[2:], **shared, **tiling
            )
            launch(join_kernel, view.number)(
                *inputs, sums, first, *outputs, classes, parts, *view[2:], *options,
                PARTS=configs.power_of_two(parts), num_warps=1, num_stages=1, **shared,
            )  # fmt: skip
    return loss, lse, argmax, entropy


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    return _forward(logits, target, weight, ignore_index, label_smoothing, softcap, logit_scale)[:2]


def cross_entropy_forward_argmax(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    return _forward(logits, target, weight, *options, with_argmax=True)[:3]


def cross_entropy_forward_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    loss, lse, _, entropy = _forward(logits, target, weight, *options, with_entropy=True)
    return loss, lse, entropy


def _backward(
    grad: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    shard: Shard | None = None,
) -> None:
    classes = logits.shape[-1]
    view, out = rows(logits), rows(grad)
    config = configs.backward(classes, logits.element_size(), heavy=softcap is not None)
    blocks = -(-classes // config.block)
    if view.number == 0:
        return
    lse = dense(lse)
    weights = class_weight(weight, lse)
    weight_sum = weights
    if shard is not None:
        weight_sum = lse if shard.coefficient is None else dense(shard.coefficient)
    elif weight is not None and label_smoothing > 0.0:
        weight_sum = weights.sum()
    grad_loss, grad_loss_stride = per_row(grad_loss, lse)
    grad_lse_row, grad_lse_stride = per_row(grad_lse, lse)
    grad_entropy_row, grad_entropy_stride = per_row(grad_entropy, lse)
    with _on(logits):
        launch(backward_kernel, view.number * blocks)(
            grad_loss,
            grad_lse_row,
            grad_entropy_row,
            view.tensor,
            dense(target),
            lse,
            lse if entropy is None else dense(entropy),
            weights,
            weight_sum,
            out.tensor,
            classes,
            blocks,
            view.inner,
            view.outer_stride,
            view.stride,
            out.inner,
            out.outer_stride,
            out.stride,
            grad_loss_stride,
            grad_lse_stride,
            grad_entropy_stride,
            0 if shard is None else shard.class_start,
            0 if shard is None else shard.num_classes,
            ignore_index,
            label_smoothing,
            softcap or 0.0,
            logit_scale,
            HAS_GRAD_LSE=grad_lse is not None,
            HAS_ENTROPY=grad_entropy is not None,
            HAS_WEIGHT=weight is not None,
            HAS_SMOOTHING=label_smoothing > 0.0,
            SOFTCAP=configs.softcap(softcap, logits.element_size()),
            EDGES=not (_aligned(view, classes) and _aligned(out, classes)),
            SAME_ROWS=view[2:] == out[2:],
            SHARD=shard is not None,
            COMPARE=blocks < 8,
            BLOCK=config.block,
            VECTOR=configs.vector(logits.element_size()),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    grad = _empty_grad(logits)
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    _backward(grad, grad_loss, grad_lse, logits, target, lse, weight, *options)
    return grad


def cross_entropy_backward_(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> None:
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    if rows(logits).tensor is logits:
        _backward(logits, grad_loss, grad_lse, logits, target, lse, weight, *options)
        torch.autograd.graph.increment_version(logits)  # a launch is not seen by autograd
    else:  # rows that no two strides describe: through a dense gradient
        logits.copy_(
            cross_entropy_backward(
                grad_loss,
                grad_lse,
                logits,
                target,
                lse,
                weight,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                softcap=softcap,
                logit_scale=logit_scale,
            )
        )


def cross_entropy_backward_entropy(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    grad = _empty_grad(logits)
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    _backward(grad, grad_loss, grad_lse, logits, target, lse, weight, *options, grad_entropy, entropy)
    return grad


def soft_cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    classes = logits.shape[-1]
    loss = _empty_rows(logits)
    lse = torch.empty_like(loss)
    view, target_view = rows(logits), rows(target)
    config = configs.soft(classes, logits.element_size())
    if view.number > 0:
        with _on(logits):
            launch(soft_forward_kernel, view.number)(
                view.tensor,
                target_view.tensor,
                class_weight(weight, lse),
                loss,
                lse,
                classes,
                *view[2:],
                *target_view[2:],
                label_smoothing,
                softcap or 0.0,
                logit_scale,
                HAS_WEIGHT=weight is not None,
                SOFTCAP=configs.softcap(softcap, logits.element_size()),
                BLOCK=config.block,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    return loss, lse


def soft_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    classes = logits.shape[-1]
    grad = _empty_grad(logits)
    view, target_view = rows(logits), rows(target)
    config = configs.soft(classes, logits.element_size())
    if view.number == 0:
        return grad
    lse = dense(lse)
    grad_loss, grad_loss_stride = per_row(grad_loss, lse)
    grad_lse_row, grad_lse_stride = per_row(grad_lse, lse)
    with _on(logits):
        launch(soft_backward_kernel, view.number)(
            grad_loss,
            grad_lse_row,
            view.tensor,
            target_view.tensor,
            lse,
            class_weight(weight, lse),
            grad,
            classes,
            *view[2:],
            *target_view[2:],
            grad_loss_stride,
            grad_lse_stride,
            label_smoothing,
            softcap or 0.0,
            logit_scale,
            HAS_GRAD_LSE=grad_lse is not None,
            HAS_WEIGHT=weight is not None,
            SOFTCAP=configs.softcap(softcap, logits.element_size()),
            BLOCK=config.block,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return grad
