"""Launchers of the one-pass operators; see launch.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..reference import grad_lse_of_square
from ..rows import Rows, dense, per_row, rows
from . import configs
from .cached import Launch, plan
from .common import Strides, class_weights, edges, empty_grad, empty_rows, on_device_of, processors
from .launch import prepare_backward, prepare_forward
from .one_pass import one_pass_kernel, scale_kernel


@functools.cache
def _shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that one program may keep a row in, and how many may share one; 0 where one_pass_shared.py cannot run.

    Programs that share a row wait for each other, so all must fit on the device at once, with those of other streams: a
    quarter as many as there are processors.
    """
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return 0, 0
    try:
        from . import one_pass_shared  # noqa: F401
    except (ImportError, AttributeError):  # Gluon is experimental: another Triton may not have what is asked of it
        return 0, 0
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0), max(properties.multi_processor_count // 4, 1)


def _with_grad(
    view: Rows,
    grad: Rows,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> tuple[Tensor, Tensor]:
    logits = view.tensor
    if view.number == 0:
        return empty_rows(logits), empty_rows(logits)
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    scale, scale_stride = per_row(grad_scale, logits)
    square, square_stride = per_row(grad_lse_square, logits)
    parts, launch = _one_pass_launch(
        view[2:],
        grad[2:],
        logits.shape[-1],
        logits.element_size(),
        logits.data_ptr() % 16 == 0,
        _shared_memory(logits.device),
        (scale_stride, square_stride),
        grad_lse_square is not None,
        weight is not None,
        *options,
    )
    shared = launch.kernel is not one_pass_kernel
    if not shared and view.number < processors(logits):  # a program a row would leave some idle
        with on_device_of(logits):
            return _in_two_visits(view, grad, target, grad_scale, grad_lse_square, weight, *options)
    loss = empty_rows(logits)
    lse = torch.empty_like(loss)
    if shared:
        # What programs exchange; not read where they have a row each.
        extra = lse if parts == 1 else torch.zeros(1 + view.number * parts, dtype=torch.int64, device=logits.device)
    else:
        extra = class_weights(weight, lse, label_smoothing, logits.element_size(), view[2:], grad[2:])
    with on_device_of(logits):
        launch(view.number * parts, logits, dense(target), scale, square, extra, loss, lse, grad.tensor)
    return loss, lse


def _in_two_visits(
    view: Rows,
    grad: Rows,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> tuple[Tensor, Tensor]:
    """Forward and backward, each over many programs; few rows are still in the L2 cache at the second visit."""
    logits, options = view.tensor, (ignore_index, label_smoothing, softcap, logit_scale)
    loss, lse = prepare_forward(logits, target, weight, *options)(logits, target, weight)
    grad_lse = grad_lse_of_square(grad_lse_square, lse, target, ignore_index)
    tensors = (grad_scale.expand_as(lse), grad_lse, logits, target, lse, weight)
    prepare_backward(grad[2:], *tensors, *options)(grad.tensor, *tensors)
    return loss, lse


@plan
def _one_pass_launch(
    strides: Strides,
    out_strides: Strides,
    classes: int,
    itemsize: int,
    on_boundary: bool,
    shared_memory: tuple[int, int],  # see _shared_memory
    scale_strides: tuple[int, int],  # of grad_scale, grad_lse_square
    with_square: bool,
    weighted: bool,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> tuple[int, Launch]:
    """Programs a row, and the launch."""
    border = edges(classes, itemsize, strides, out_strides)
    same_rows = strides == out_strides
    numbers = (classes, *strides, *out_strides, *scale_strides, ignore_index)
    flags: dict[str, Any] = {"HAS_LSE_SQUARE": with_square, "EDGES": border, "VECTOR": configs.vector(itemsize)}
    plain = not weighted and label_smoothing == 0.0 and softcap is None and logit_scale >= 1e-30
    # Copies to shared memory take whole 16-byte vectors.
    if plain and itemsize < 8 and on_boundary and (same_rows or not border):
        shared = configs.one_pass_shared(classes, itemsize, *shared_memory)
        if shared is not None:
            from .one_pass_shared import one_pass_shared_kernel

            flags |= {"PARTS": shared.parts, "TILE": shared.tile, "TILES": shared.tiles, "WARPS": shared.num_warps}
            launch = Launch(one_pass_shared_kernel, *numbers, logit_scale, **flags, num_warps=shared.num_warps)
            return shared.parts, launch
    config = configs.one_pass(classes, itemsize)
    return 1, Launch(
        one_pass_kernel,
        *numbers,
        label_smoothing,
        softcap or 0.0,
        logit_scale,
        HAS_WEIGHT=weighted,
        HAS_SMOOTHING=label_smoothing > 0.0,
        SOFTCAP=configs.softcap(softcap, itemsize),
        SAME_ROWS=same_rows,
        BLOCK=config.block,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **flags,
    )


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
    grad = empty_grad(logits)
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    return *_with_grad(rows(logits), rows(grad), target, grad_scale, grad_lse_square, weight, *options), grad


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
    outputs = _with_grad(view, view, target, grad_scale, grad_lse_square, weight, *options)
    _wrote(view, logits)
    return outputs


def scale_grad_(grad: Tensor, factor: Tensor) -> None:
    view = rows(grad)
    if view.number == 0:
        return
    values, stride = per_row(factor, grad)
    blocks, launch = _scale_launch(view[2:], grad.shape[-1], grad.element_size(), stride)
    tiles = view.number * blocks
    with on_device_of(grad):
        launch(min(tiles, 8 * processors(grad)), view.tensor, values, varying=(tiles,))
    _wrote(view, grad)


@plan
def _scale_launch(strides: Strides, classes: int, itemsize: int, factor_stride: int) -> tuple[int, Launch]:
    """Programs a row, and the launch."""
    config = configs.backward(classes, itemsize)
    blocks = -(-classes // config.block)
    return blocks, Launch(
        scale_kernel,
        classes,
        blocks,
        *strides,
        factor_stride,
        varying=1,
        PER_ROW=factor_stride != 0,
        BLOCK=config.block,
        num_warps=config.num_warps,
        num_stages=1,
    )


def _wrote(view: Rows, tensor: Tensor) -> None:
    """After a kernel has written to a view of the tensor's rows."""
    if view.tensor is tensor:
        torch.autograd.graph.increment_version(tensor)  # a launch is not seen by autograd
    else:
        tensor.copy_(view.tensor.view(tensor.shape))
