"""Launchers of the operators for class probabilities. See launch.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..options import DEFAULTS, RowOptions
from ..rows import class_weight, dense, per_row, rows
from . import configs
from .common import features, launch, launcher
from .soft import soft_backward_kernel, soft_forward_kernel


@launcher
def soft_cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    check_target: bool = True,
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, Tensor]:
    classes, sizes = logits.shape[-1], (logits.element_size(), target.element_size())
    loss = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    lse = torch.empty_like(loss)
    view, probabilities = rows(logits), rows(target)
    if view.number == 0:
        return loss, lse
    flags = features(weight, options, sizes[0])
    launch(
        soft_forward_kernel,
        view.number,
        (view.tensor, probabilities.tensor, class_weight(weight, lse), loss, lse),
        classes,
        *view[2:],
        *probabilities[2:],
        *options.kernel_arguments()[1:],
        **flags,
        BLOCK=configs.block(classes, configs.soft_bytes(*sizes, **flags)),
    )
    return loss, lse


@launcher
def soft_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> Tensor:
    classes, sizes = logits.shape[-1], (logits.element_size(), target.element_size())
    gradient = logits.new_empty(logits.shape)
    view, probabilities = rows(logits), rows(target)
    if view.number == 0:
        return gradient
    lse = dense(lse)
    grad_loss_row, grad_loss_stride = per_row(grad_loss, lse)
    grad_lse_row, grad_lse_stride = per_row(grad_lse, lse)
    flags = {"HAS_GRAD_LSE": grad_lse is not None, **features(weight, options, sizes[0])}
    launch(
        soft_backward_kernel,
        view.number,
        (grad_loss_row, grad_lse_row, view.tensor, probabilities.tensor, lse, class_weight(weight, lse), gradient),
        classes,
        *view[2:],
        *probabilities[2:],
        grad_loss_stride,
        grad_lse_stride,
        *options.kernel_arguments()[1:],
        **flags,
        BLOCK=configs.block(classes, configs.soft_bytes(*sizes, **flags)),
    )
    return gradient
