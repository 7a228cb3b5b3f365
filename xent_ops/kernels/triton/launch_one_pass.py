"""Launchers of the one-pass operators; see launch.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import accumulator
from . import configs
from .launch import Rows, _aligned, _dense, _on, _per_row, _processors, _weight, rows
from .one_pass import one_pass_kernel, scale_kernel


def _with_grad(
    view: Rows,
    grad: Rows,
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> tuple[Tensor, Tensor]:
    classes = logits.shape[-1]
    loss = logits.new_empty(logits.shape[:-1], dtype=accumulator(logits))
    lse = torch.empty_like(loss)
    if view.number == 0:
        return loss, lse
    config = configs.one_pass(classes, logits.element_size())
    scale, scale_stride = _per_row(grad_scale, lse)
    square, square_stride = _per_row(grad_lse_square, lse)
    with _on(logits):
        one_pass_kernel[(view.number,)](
            view.tensor,
            _dense(target),
            scale,
            square,
            _weight(weight, lse),
            loss,
            lse,
            grad.tensor,
            classes,
            *view[2:],
            *grad[2:],
            scale_stride,
            square_stride,
            ignore_index,
            label_smoothing,
            softcap or 0.0,
            logit_scale,
            HAS_LSE_SQUARE=grad_lse_square is not None,
            HAS_WEIGHT=weight is not None,
            HAS_SMOOTHING=label_smoothing > 0.0,
            SOFTCAP=configs.softcap(softcap, logits.element_size()),
            EDGES=not (_aligned(view, classes) and _aligned(grad, classes)),
            SAME_ROWS=view[2:] == grad[2:],
            BLOCK=config.block,
            VECTOR=configs.vector(logits.element_size()),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return loss, lse


def cross_entropy_with_grad(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = logits.new_empty(logits.shape)
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    return *_with_grad(rows(logits), rows(grad), logits, target, grad_scale, grad_lse_square, weight, *options), grad


def cross_entropy_with_grad_(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    # Rows that no two strides describe are copied: the gradient is written over the copy, and then back.
    view = rows(logits)
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    outputs = _with_grad(view, view, logits, target, grad_scale, grad_lse_square, weight, *options)
    _wrote(view, logits)
    return outputs


def scale_grad_(grad: Tensor, factor: Tensor) -> None:
    view = rows(grad)
    if view.number == 0:
        return
    classes = grad.shape[-1]
    config = configs.backward(classes, grad.element_size())
    blocks = -(-classes // config.block)
    tiles = view.number * blocks
    values, stride = _per_row(factor, grad)
    with _on(grad):
        scale_kernel[(min(tiles, 8 * _processors(grad)),)](
            view.tensor,
            values,
            classes,
            blocks,
            tiles,
            *view[2:],
            stride,
            PER_ROW=stride != 0,
            BLOCK=config.block,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    _wrote(view, grad)


def _wrote(view: Rows, tensor: Tensor) -> None:
    """After a kernel has written to a view of the tensor's rows."""
    if view.tensor is tensor:
        torch.autograd.graph.increment_version(tensor)  # a launch is not seen by autograd
    else:
        tensor.copy_(view.tensor.view(tensor.shape))
