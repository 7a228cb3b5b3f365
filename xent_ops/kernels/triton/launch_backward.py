"""Launchers of the backward operator and its in-place form; see launch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..options import DEFAULTS, RowOptions
from ..reference import accumulator, columns_of
from ..rows import class_weight, dense_like, per_row_like
from ..sizes import size_hint
from . import configs
from .backward import backward_kernel
from .cached import Launch
from .common import Run, Strides, class_weights, edges, launcher_with_in_place_form, row_layout
from .flags import flags_of
from .launch_reduce import prepare_sum


@launcher_with_in_place_form
def cross_entropy_backward(
    out_strides: Strides,  # strides of the rows that the gradient is written to
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
    grad_dtype: torch.dtype | None = None,
    lse_low: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    narrow: bool = False,
) -> Run:
    """``write(gradient, grad_loss, ..., lse_coefficient)``. Columns of a slice beyond the last class get zeros."""
    width, shard = logits.shape[-1], num_classes is not None
    columns = width if num_classes is None else columns_of(width, class_start, num_classes)
    padded = shard and columns < width
    if padded:
        logits = logits[..., :columns]
    number, strides, as_rows = row_layout(logits)
    if size_hint(logits.numel()) == 0:

        def write_zeros(gradient: Tensor, *_: Any) -> None:
            gradient.zero_()  # it has columns behind the last class, or no element

        return write_zeros
    classes, itemsize, dtype = logits.shape[-1], logits.element_size(), accumulator(logits)
    weighted, smoothing = weight is not None, options.label_smoothing > 0.0
    as_grad_loss, grad_loss_stride = per_row_like(grad_loss)
    as_grad_lse, grad_lse_stride = per_row_like(grad_lse)
    as_grad_entropy, grad_entropy_stride = per_row_like(grad_entropy)
    as_targets, as_lse = dense_like(target), dense_like(lse, dtype)
    as_divisor = dense_like(lse if divisors is None else divisors)
    as_entropy = dense_like(lse if entropy is None else entropy, dtype)
    as_lse_low = dense_like(lse if lse_low is None else lse_low, dtype)
    as_lse_coefficient = dense_like(lse if lse_coefficient is None else lse_coefficient, dtype)
    sum_of = prepare_sum(classes, dtype, logits.device) if weighted and smoothing and not shard else None
    written = itemsize if grad_dtype is None else grad_dtype.itemsize
    border = edges(classes, written, strides, out_strides)
    config = configs.backward(classes, itemsize, configs.load(options, weighted))
    if narrow:
        config = configs.backward_in_order(classes)
    blocks = -(-classes // (config.block * config.tiles))
    flags = flags_of(options, weighted, itemsize)._replace(
        entropy=grad_entropy is not None,
        grad_lse=grad_lse is not None,
        lse_square=lse_square_scale != 0.0,
        divisor=divisors is not None,
        shard=shard,
        lse_low=lse_low is not None,
    )
    launch = Launch(
        backward_kernel,
        number * blocks,
        classes,
        blocks,
        *strides,
        *out_strides,
        grad_loss_stride,
        grad_lse_stride,
        grad_entropy_stride,
        class_start,
        num_classes or 0,
        *options.kernel_arguments(),
        lse_square_scale,
        FLAGS=flags,
        EDGES=border,
        SAME_ROWS=strides == out_strides,
        COMPARE=blocks < 8 and not narrow,
        NARROW=narrow,
        BLOCK=config.block,
        TILES=config.tiles,
        VECTOR=configs.vector(written),
        num_warps=config.num_warps,
        num_stages=1,
    )

    def write(
        gradient: Tensor,
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
        _class_start: int = 0,
        _num_classes: int | None = None,
        _grad_dtype: torch.dtype | None = None,
        lse_low: Tensor | None = None,
    ) -> None:
        if padded:
            gradient[..., columns:].zero_()
            gradient, logits = gradient[..., :columns], logits[..., :columns]
            weight = None if weight is None else weight[:columns]
        lse = as_lse(lse)
        weight_sum = lse if lse_coefficient is None else as_lse_coefficient(lse_coefficient)
        if sum_of is not None:
            weight = class_weight(weight, lse)
            weight_sum = sum_of(weight)
        launch(
            as_grad_loss(grad_loss),
            lse if divisors is None else as_divisor(divisors),
            lse if grad_lse is None else as_grad_lse(grad_lse),
            lse if grad_entropy is None else as_grad_entropy(grad_entropy),
            as_rows(logits),
            as_targets(target),
            lse,
            lse if lse_low is None else as_lse_low(lse_low),
            lse if entropy is None else as_entropy(entropy),
            class_weights(weight, lse, smoothing and border != 0),
            weight_sum,
            gradient,
        )

    return write
