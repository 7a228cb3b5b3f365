"""Launchers of the operators for class probabilities; see launch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference import accumulator
from ..rows import class_weight, dense, per_row, rows
from . import configs
from .cached import Launch, plan
from .common import Strides, empty_grad, empty_rows, on_device_of
from .soft import soft_backward_kernel, soft_forward_kernel


def _soft_constants(classes: int, itemsize: int, weighted: bool, softcap: float | None) -> dict[str, Any]:
    config = configs.soft(classes, itemsize)
    return {
        "HAS_WEIGHT": weighted,
        "SOFTCAP": configs.softcap(softcap, itemsize),
        "BLOCK": config.block,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


@plan
def _soft_forward_launch(
    strides: Strides,
    target_strides: Strides,
    classes: int,
    itemsize: int,
    weighted: bool,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> Launch:
    numbers = (classes, *strides, *target_strides, label_smoothing, softcap or 0.0, logit_scale)
    return Launch(soft_forward_kernel, *numbers, **_soft_constants(classes, itemsize, weighted, softcap))


@plan
def _soft_backward_launch(
    strides: Strides,
    target_strides: Strides,
    classes: int,
    itemsize: int,
    grad_strides: tuple[int, int],  # of grad_loss, grad_lse
    with_grad_lse: bool,
    weighted: bool,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> Launch:
    numbers = (classes, *strides, *target_strides, *grad_strides, label_smoothing, softcap or 0.0, logit_scale)
    constants = _soft_constants(classes, itemsize, weighted, softcap)
    return Launch(soft_backward_kernel, *numbers, HAS_GRAD_LSE=with_grad_lse, **constants)


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
    loss = empty_rows(logits)
    lse = torch.empty_like(loss)
    view, target_view = rows(logits), rows(target)
    if view.number > 0:
        options = (label_smoothing, softcap, logit_scale)
        launch = _soft_forward_launch(
            view[2:], target_view[2:], classes, logits.element_size(), weight is not None, *options
        )
        with on_device_of(logits):
            launch(view.number, view.tensor, target_view.tensor, class_weight(weight, lse), loss, lse)
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
    grad = empty_grad(logits)
    view, target_view = rows(logits), rows(target)
    if view.number == 0:
        return grad
    lse = dense(lse.to(accumulator(logits)))  # in whose dtype the kernel computes
    grad_loss, grad_loss_stride = per_row(grad_loss, lse)
    grad_lse_row, grad_lse_stride = per_row(grad_lse, lse)
    launch = _soft_backward_launch(
        view[2:],
        target_view[2:],
        classes,
        logits.element_size(),
        (grad_loss_stride, grad_lse_stride),
        grad_lse is not None,
        weight is not None,
        label_smoothing,
        softcap,
        logit_scale,
    )
    tensors = (grad_loss, grad_lse_row, view.tensor, target_view.tensor, lse, class_weight(weight, lse), grad)
    with on_device_of(logits):
        launch(view.number, *tensors)
    return grad
