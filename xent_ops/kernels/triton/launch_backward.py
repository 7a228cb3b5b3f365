"""Launchers of the backward operators, of whole logits and of a shard's; see launch.py for what launchers share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import reference_shard
from ..options import DEFAULTS, Options
from ..reference import accumulator
from ..rows import class_weight, dense_like, dense_rows, per_row_like
from ..sizes import traced
from . import configs
from .backward import backward_kernel
from .cached import Launch
from .common import Run, Strides, class_weights, edges, into_empty, launcher, new_gradient, over_logits, row_layout
from .flags import flags_of
from .launch_reduce import prepare_sum


def prepare_backward(
    out_strides: Strides,  # of the rows that the gradient is written to
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    shard: tuple[int, int] | None = None,  # class_start, num_classes
    coefficient: Tensor | None = None,  # of a shard, see reference_shard.py
) -> Run:
    """``write(gradient, grad_loss, ..., divisor, grad_entropy, entropy, coefficient)``."""
    number, strides, as_rows, _ = row_layout(logits)
    if traced(logits.numel()) == 0:
        return lambda *_tensors: None
    classes, itemsize, dtype = logits.shape[-1], logits.element_size(), accumulator(logits)
    weighted, smoothing = weight is not None, options.label_smoothing > 0.0
    as_grad_loss, grad_loss_stride = per_row_like(grad_loss)
    as_grad_lse, grad_lse_stride = per_row_like(grad_lse)
    as_grad_entropy, grad_entropy_stride = per_row_like(grad_entropy)
    as_targets, as_lse = dense_like(target), dense_like(lse, dtype)
    as_divisor = dense_like(lse if divisor is None else divisor)
    as_entropy = dense_like(lse if entropy is None else entropy, dtype)
    as_coefficient = dense_like(lse if coefficient is None else coefficient, dtype)
    sum_of = prepare_sum(classes, dtype, logits.device) if weighted and smoothing and shard is None else None
    border = edges(classes, itemsize, strides, out_strides)
    config = configs.backward(classes, itemsize, configs.load(options, weighted))
    blocks = -(-classes // (config.block * config.tiles))
    flags = flags_of(options, weighted, itemsize)._replace(
        entropy=grad_entropy is not None,
        grad_lse=grad_lse is not None,
        lse_square=lse_square_scale != 0.0,
        divisor=divisor is not None,
        shard=shard is not None,
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
        *(shard or (0, 0)),
        *options.numbers(),
        lse_square_scale,
        FLAGS=flags,
        EDGES=border,
        SAME_ROWS=strides == out_strides,
        COMPARE=blocks < 8,
        BLOCK=config.block,
        TILES=config.tiles,
        VECTOR=configs.vector(itemsize),
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
        divisor: Tensor | None = None,
        grad_entropy: Tensor | None = None,
        entropy: Tensor | None = None,
        coefficient: Tensor | None = None,
    ) -> None:
        lse = as_lse(lse)
        weight_sum = lse if coefficient is None else as_coefficient(coefficient)
        if sum_of is not None:
            weight = class_weight(weight, lse)
            weight_sum = sum_of(weight)
        launch(
            as_grad_loss(grad_loss),
            lse if divisor is None else as_divisor(divisor),
            lse if grad_lse is None else as_grad_lse(grad_lse),
            lse if grad_entropy is None else as_grad_entropy(grad_entropy),
            as_rows(logits),
            as_targets(target),
            lse,
            lse if entropy is None else as_entropy(entropy),
            class_weights(weight, lse, smoothing and border != 0),
            weight_sum,
            gradient,
        )

    return write


@launcher
def cross_entropy_backward(*args: Any, **options: Any) -> Run:
    return into_empty(prepare_backward, *args, **options)


@launcher
def cross_entropy_backward_(*args: Any, **options: Any) -> Run:
    return over_logits(prepare_backward, *args, **options)


@launcher
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
    options: Options = DEFAULTS,
) -> Run:
    tensors = (grad_loss, grad_lse, logits, target, lse, weight)
    write = prepare_backward(
        dense_rows(logits.shape), *tensors, options=options, grad_entropy=grad_entropy, entropy=entropy
    )
    gradient = new_gradient(logits)

    def backward(
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        entropy: Tensor,
        weight: Tensor | None = None,
    ) -> Tensor:
        grad = gradient()
        write(grad, grad_loss, grad_lse, logits, target, lse, weight, None, grad_entropy, entropy)
        return grad

    return backward


def _prepare_shard_backward(
    out_strides: Strides,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    coefficient: Tensor | None = None,
    divisor: Tensor | None = None,
    **options: Any,
) -> Run:
    """``write(gradient, grad_loss, ..., divisor)``. Columns beyond the last class get zeros."""
    columns = reference_shard.columns_of(logits.shape[-1], class_start, num_classes)
    padded = columns < logits.shape[-1]
    if padded:
        logits = logits[..., :columns]
    write_classes = prepare_backward(
        out_strides,
        grad_loss,
        grad_lse,
        logits,
        target,
        lse,
        weight,
        divisor,
        shard=(class_start, num_classes),
        coefficient=coefficient,
        **options,
    )

    def write(
        gradient: Tensor,
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        _class_start: int,
        _num_classes: int,
        weight: Tensor | None = None,
        coefficient: Tensor | None = None,
        divisor: Tensor | None = None,
    ) -> None:
        if padded:
            gradient[..., columns:].zero_()
            gradient, logits = gradient[..., :columns], logits[..., :columns]
            weight = None if weight is None else weight[:columns]
        rest = (target, lse, weight, divisor, None, None, coefficient)
        write_classes(gradient, grad_loss, grad_lse, logits, *rest)

    return write


@launcher
def cross_entropy_shard_backward(*args: Any, **options: Any) -> Run:
    return into_empty(_prepare_shard_backward, *args, **options)


@launcher
def cross_entropy_shard_backward_(*args: Any, **options: Any) -> Run:
    return over_logits(_prepare_shard_backward, *args, **options)
