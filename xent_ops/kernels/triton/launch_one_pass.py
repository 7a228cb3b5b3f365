"""Launchers of the one-pass operators; see launch.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..rows import Rows, class_weight, dense, per_row, rows
from . import configs
from .cached import launch
from .launch import _aligned, _backward, _empty_grad, _empty_rows, _forward, _on, _processors
from .one_pass import one_pass_kernel, scale_kernel


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may keep a row in; 0 where one_pass_shared.py cannot run."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    try:
        from . import one_pass_shared  # noqa: F401
    except (ImportError, AttributeError):  # Gluon is experimental: another Triton may not have what is asked of it
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


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
    loss = _empty_rows(logits)
    lse = torch.empty_like(loss)
    if view.number == 0:
        return loss, lse
    if view.number < _processors(logits):  # a row each would leave processors idle: in two visits, from the L2 cache
        options = (ignore_index, label_smoothing, softcap, logit_scale)
        loss, lse, _, _ = _forward(logits, target, weight, *options)
        grad_lse = None
        if grad_lse_square is not None:
            grad_lse = torch.where(target.to(torch.int64) == ignore_index, 0.0, 2.0 * grad_lse_square * lse)
        _backward(grad.tensor, grad_scale.expand_as(lse), grad_lse, view.tensor, target, lse, weight, *options)
        return loss, lse
    scale, scale_stride = per_row(grad_scale, lse)
    square, square_stride = per_row(grad_lse_square, lse)
    edges = not (_aligned(view, classes) and _aligned(grad, classes))
    same_rows = view[2:] == grad[2:]
    plain = weight is None and label_smoothing == 0.0 and softcap is None and logit_scale > 0.0
    shared = None
    # Copies to shared memory take whole 16-byte vectors.
    aligned = view.tensor.data_ptr() % 16 == 0 and (same_rows or not edges)
    if plain and aligned and lse.dtype == torch.float32:
        shared = configs.one_pass_shared(classes, logits.element_size(), _shared_memory(logits.device))
    flags: dict[str, Any] = {
        "HAS_LSE_SQUARE": grad_lse_square is not None,
        "EDGES": edges,
        "VECTOR": configs.vector(logits.element_size()),
    }
    strides = (classes, *view[2:], *grad[2:], scale_stride, square_stride)
    with _on(logits):
        if shared is not None:
            from .one_pass_shared import one_pass_shared_kernel

            launch(one_pass_shared_kernel, view.number)(
                view.tensor, dense(target), scale, square, loss, lse, grad.tensor, *strides, ignore_index, logit_scale,
                TILE=shared.tile, TILES=shared.tiles, KEPT=shared.kept, WARPS=shared.num_warps,
                num_warps=shared.num_warps, **flags,
            )  # fmt: skip
        else:
            config = configs.one_pass(classes, logits.element_size())
            launch(one_pass_kernel, view.number)(
                view.tensor, dense(target), scale, square, class_weight(weight, lse), loss, lse, grad.tensor, *strides,
                ignore_index, label_smoothing, softcap or 0.0, logit_scale,
                HAS_WEIGHT=weight is not None, HAS_SMOOTHING=label_smoothing > 0.0,
                SOFTCAP=configs.softcap(softcap, logits.element_size()), SAME_ROWS=same_rows,
                BLOCK=config.block, num_warps=config.num_warps, num_stages=config.num_stages, **flags,
            )  # fmt: skip
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
    grad = _empty_grad(logits)
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
    values, stride = per_row(factor, grad)
    with _on(grad):
        launch(scale_kernel, min(tiles, 8 * _processors(grad)))(
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
