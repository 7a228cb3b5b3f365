"""Launchers of the backward operators, and of the loss with its gradient. See launch.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import reference_with_grad
from ..options import DEFAULTS, RowOptions
from ..reference import columns_of, row_grads
from ..rows import class_weight, dense, per_row, rows
from . import configs
from .backward import backward_kernel
from .common import features, indices, launch, launcher
from .launch_forward import cross_entropy_forward


def _backward(
    gradient: Tensor,  # written; may be the logits
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisors: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    lse_coefficient: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    grad_dtype: None = None,
    lse_low: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> None:
    itemsize = logits.element_size()
    view, out = rows(logits), rows(gradient)
    classes = logits.shape[-1] if num_classes is None else num_classes
    columns = columns_of(logits.shape[-1], class_start, classes)
    if columns < logits.shape[-1]:
        gradient[..., columns:].zero_()  # padding behind the last class
    if view.number == 0 or columns == 0:
        return
    grad_loss, grad_lse = row_grads(
        grad_loss, grad_lse, target, lse, divisors, options.ignore_index, lse_square_scale, torch.float32
    )
    lse = dense(lse)
    grad_loss, grad_loss_stride = per_row(grad_loss, lse)
    grad_lse_row, grad_lse_stride = per_row(grad_lse, lse)
    grad_entropy_row, grad_entropy_stride = per_row(grad_entropy, lse)
    weights = class_weight(weight, lse)
    if lse_coefficient is not None:
        lse_coefficient = dense(lse_coefficient.float())
    elif weight is not None and options.label_smoothing > 0.0:
        lse_coefficient = weights.sum()
    flags = {
        "HAS_GRAD_LSE": grad_lse is not None,
        "HAS_ENTROPY": grad_entropy is not None,
        **features(weight, options, itemsize),
    }
    tensors = (
        grad_loss,
        grad_lse_row,
        grad_entropy_row,
        view.tensor,
        indices(target),
        lse,
        lse if lse_low is None else dense(lse_low),
        lse if entropy is None else dense(entropy),
        weights,
        lse if lse_coefficient is None else lse_coefficient,
        out.tensor,
    )
    launch(
        backward_kernel,
        view.number,
        tensors,
        columns,
        *view[2:],
        *out[2:],
        grad_loss_stride,
        grad_lse_stride,
        grad_entropy_stride,
        class_start,
        classes,
        *options.kernel_arguments(),
        SHARD=num_classes is not None,
        HAS_LSE_LOW=lse_low is not None,
        **flags,
        BLOCK=configs.block(columns, configs.backward_bytes(itemsize, **flags)),
    )


@launcher
def cross_entropy_backward(
    grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *args: Any, **options: Any
) -> Tensor:
    gradient = logits.new_empty(logits.shape)
    _backward(gradient, grad_loss, grad_lse, logits, *args, **options)
    return gradient


@launcher
def cross_entropy_backward_(
    grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *args: Any, **options: Any
) -> None:
    if rows(logits).tensor is logits:
        _backward(logits, grad_loss, grad_lse, logits, *args, **options)
        torch.autograd.graph.increment_version(logits)  # autograd does not see a launch
    else:  # two strides cannot describe the rows: use a dense gradient
        logits.copy_(cross_entropy_backward(grad_loss, grad_lse, logits, *args, **options))


_with_grad = functools.partial(reference_with_grad.cross_entropy_with_grad, forward=cross_entropy_forward)


@launcher
def cross_entropy_with_grad(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    """Two kernels: a row does not fit into a vector core's memory, so the logits are read twice in any case."""
    return _with_grad(*args, **options, backward=cross_entropy_backward)


@launcher
def cross_entropy_with_grad_(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return _with_grad(*args, **options, backward=cross_entropy_backward_)
