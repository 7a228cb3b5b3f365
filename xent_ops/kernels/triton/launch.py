"""From tensors to kernels: take strides, pick a config, allocate, launch. One function an operator, named as it is.

Two steps, for small losses take as long as the host does (``InTwoSteps``, common.py): the first looks at all but the
numbers in the tensors, and what it returns, for these and all like them, is the second. It must hold no tensor. What
follows from strides and options alone is kept besides (``plan``, cached.py). Arguments have passed the operators'
checks. Nothing here synchronises, so that every launch can be captured in a CUDA graph. What is allocated is
an output, a few numbers a row or class, or, where no two strides describe the rows, a copy of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference import accumulator
from ..rows import Rows, class_weight, dense, dense_like, dense_rows, per_row_like, rows, rows_like
from . import configs
from .backward import backward_kernel
from .cached import Bound, Launch, plan
from .common import (
    InTwoSteps,
    Strides,
    class_weights,
    copied_to_logits,
    edges,
    empty_like,
    into_empty,
    over_logits,
    place,
    processors,
)
from .forward import forward_kernel
from .launch_mean import count
from .short import short_kernel
from .split_row import join_kernel, partial_kernel


class ForwardLaunches(NamedTuple):
    kernel: Launch
    short_rows: int = 0  # how many of them one program handles
    parts: int = 1  # how many programs share a row
    join: Launch | None = None  # of their parts

    def bound(self) -> ForwardLaunches:
        return self._replace(kernel=Bound(self.kernel), join=self.join and Bound(self.join))

    def __call__(self, number: int, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        if self.short_rows:
            self.kernel(-(-number // self.short_rows), *inputs, *outputs, varying=(number,))
        elif self.join is None:
            self.kernel(number, *inputs, *outputs)
        else:
            _loss, lse, argmax, _entropy = outputs
            sums = first = torch.empty((number, 6, self.parts), dtype=lse.dtype, device=lse.device)
            if argmax is not lse:
                first = torch.empty((number, self.parts), dtype=torch.int32, device=lse.device)
            self.kernel(number * self.parts, *inputs, sums, first)
            self.join(number, *inputs, sums, first, *outputs)


@plan
def _forward_launches(
    strides: Strides,
    classes: int,
    itemsize: int,
    config: configs.Config,
    parts: int,
    part_classes: int,
    weighted: bool,
    with_argmax: bool,
    with_entropy: bool,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> ForwardLaunches:
    options = (ignore_index, label_smoothing, softcap or 0.0, logit_scale)
    flags: dict[str, Any] = {
        "HAS_WEIGHT": weighted,
        "HAS_SMOOTHING": label_smoothing > 0.0,
        "SOFTCAP": configs.softcap(softcap, itemsize),
        "HAS_ARGMAX": with_argmax,
        "HAS_ENTROPY": with_entropy,
    }
    vector = configs.vector(itemsize)
    border = edges(classes, itemsize, strides)
    load = configs.load(softcap, weighted, label_smoothing)
    short = configs.short(classes, itemsize, with_argmax or with_entropy, load, label_smoothing > 0.0)
    if short is not None and not border and logit_scale > 0.0:
        tiling = {"ROWS": short.rows, "BLOCK": short.block, "VECTOR": vector, "num_warps": short.num_warps}
        kernel = Launch(short_kernel, classes, *strides, *options, varying=1, **flags, **tiling, num_stages=1)
        return ForwardLaunches(kernel, short.rows)
    tiling = {"EDGES": border, "BLOCK": config.block, "VECTOR": vector}
    tiling |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if parts == 1:
        return ForwardLaunches(Launch(forward_kernel, classes, *strides, *options, **flags, **tiling))
    kernel = Launch(partial_kernel, classes, part_classes, parts, *strides, *options[2:], **flags, **tiling)
    tiling = {"PARTS": configs.power_of_two(parts), "num_warps": 1, "num_stages": 1}
    join = Launch(join_kernel, classes, parts, *strides, *options, **flags, **tiling)
    return ForwardLaunches(kernel, parts=parts, join=join)


def forward_launches(
    view: Rows,
    weighted: bool,
    with_argmax: bool,
    with_entropy: bool,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> ForwardLaunches:
    logits = view.tensor
    classes, itemsize, extra = logits.shape[-1], logits.element_size(), with_argmax or with_entropy
    load = configs.load(softcap, weighted, label_smoothing)
    split = configs.parts(view.number, classes, configs.forward(classes, itemsize, extra, load), processors(logits))
    flags, options = (weighted, with_argmax, with_entropy), (ignore_index, label_smoothing, softcap, logit_scale)
    return _forward_launches(view[2:], classes, itemsize, *split, *flags, *options)


def prepare_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    with_argmax: bool = False,
    with_entropy: bool = False,
) -> Callable[..., tuple[Tensor, ...]]:
    """What makes (loss, lse), and argmax or entropy, of tensors like these."""
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    view = rows(logits)
    number, strides, itemsize = view.number, view[2:], logits.element_size()
    launches = None
    if number > 0:
        launches = forward_launches(view, weight is not None, with_argmax, with_entropy, *options).bound()
    as_rows, as_targets, empty = rows_like(logits, view), dense_like(target), empty_like(logits)
    row = place(logits.shape[:-1], accumulator(logits))
    indices = place(logits.shape[:-1], torch.int64)

    def forward(logits: Tensor, target: Tensor, weight: Tensor | None = None, **_options: Any) -> tuple[Tensor, ...]:
        loss, lse = empty(*row), empty(*row)
        argmax = empty(*indices) if with_argmax else lse
        entropy = empty(*row) if with_entropy else lse
        if launches is not None:
            weights = lse if weight is None else class_weights(weight, lse, label_smoothing, itemsize, strides)
            launches(number, (as_rows(logits), as_targets(target), weights), (loss, lse, argmax, entropy))
        if with_argmax:
            return loss, lse, argmax
        return (loss, lse, entropy) if with_entropy else (loss, lse)

    return forward


@InTwoSteps
def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Callable[..., tuple[Tensor, ...]]:
    return prepare_forward(logits, target, weight, ignore_index, label_smoothing, softcap, logit_scale)


@InTwoSteps
def cross_entropy_forward_argmax(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Callable[..., tuple[Tensor, ...]]:
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    return prepare_forward(logits, target, weight, *options, with_argmax=True)


@InTwoSteps
def cross_entropy_forward_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Callable[..., tuple[Tensor, ...]]:
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    return prepare_forward(logits, target, weight, *options, with_entropy=True)


@plan
def backward_launch(
    strides: Strides,
    out_strides: Strides,
    classes: int,
    itemsize: int,
    grad_strides: tuple[int, int, int],  # of grad_loss, grad_lse, grad_entropy
    with_grad_lse: bool,
    with_entropy: bool,
    weighted: bool,
    shard: tuple[int, int] | None,  # class_start, num_classes
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    with_divisor: bool = False,
) -> tuple[int, Launch]:
    """Programs a row, and the launch."""
    config = configs.backward(classes, itemsize, configs.load(softcap, weighted, label_smoothing))
    blocks = -(-classes // (config.block * config.tiles))
    return blocks, Launch(
        backward_kernel,
        classes,
        blocks,
        *strides,
        *out_strides,
        *grad_strides,
        *(shard or (0, 0)),
        ignore_index,
        label_smoothing,
        softcap or 0.0,
        logit_scale,
        HAS_DIVISOR=with_divisor,
        HAS_GRAD_LSE=with_grad_lse,
        HAS_ENTROPY=with_entropy,
        HAS_WEIGHT=weighted,
        HAS_SMOOTHING=label_smoothing > 0.0,
        SOFTCAP=configs.softcap(softcap, itemsize),
        EDGES=edges(classes, itemsize, strides, out_strides),
        SAME_ROWS=strides == out_strides,
        SHARD=shard is not None,
        COMPARE=blocks < 8,
        BLOCK=config.block,
        TILES=config.tiles,
        VECTOR=configs.vector(itemsize),
        num_warps=config.num_warps,
        num_stages=1,
    )


def prepare_backward(
    out_strides: Strides,  # of what the gradient is written to
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
    shard: tuple[int, int] | None = None,  # class_start, num_classes
    divisor: Tensor | None = None,
) -> Callable[..., Tensor]:
    """What writes the gradient of logits like these to a tensor with such rows, and returns it."""
    view = rows(logits)
    number, strides = view.number, view[2:]
    if logits.numel() == 0:
        return lambda grad, *_tensors, **_options: grad
    classes, itemsize, dtype = logits.shape[-1], logits.element_size(), accumulator(logits)
    grads = [per_row_like(tensor) for tensor in (grad_loss, grad_lse, grad_entropy)]
    (as_grad_loss, as_grad_lse, as_grad_entropy), grad_strides = zip(*grads, strict=True)
    flags = (grad_lse is not None, grad_entropy is not None, weight is not None, shard)
    options = (ignore_index, label_smoothing, softcap, logit_scale, divisor is not None)
    layout = (strides, out_strides, classes, itemsize)
    blocks, launch = backward_launch(*layout, grad_strides, *flags, *options)
    programs, launch = number * blocks, Bound(launch)
    as_rows, as_targets, as_lse = rows_like(logits, view), dense_like(target), dense_like(lse, dtype)

    def backward(
        grad: Tensor,
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        weight: Tensor | None = None,
        divisor: Tensor | None = None,
        coefficient: Tensor | None = None,  # of a shard, see reference_shard.py
        grad_entropy: Tensor | None = None,
        entropy: Tensor | None = None,
        **_options: Any,
    ) -> Tensor:
        lse = as_lse(lse)
        weights = weight_sum = lse
        if weight is not None:
            if shard is not None:
                weight_sum = lse if coefficient is None else dense(coefficient)
            elif label_smoothing > 0.0:
                # Not torch's sum, which may take four times as long: 32 us for 128256 weights.
                weight = class_weight(weight, lse)
                weight_sum = count(weight, None, dtype)[1]
            weights = class_weights(weight, lse, label_smoothing, itemsize, strides, out_strides)
        launch(
            programs,
            as_grad_loss(grad_loss),
            lse if divisor is None else divisor,
            lse if grad_lse is None else as_grad_lse(grad_lse),
            lse if grad_entropy is None else as_grad_entropy(grad_entropy),
            as_rows(logits),
            as_targets(target),
            lse,
            lse if entropy is None else dense(entropy),
            weights,
            weight_sum,
            grad,
        )
        return grad

    return backward


@InTwoSteps
def cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Callable[..., Tensor]:
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    tensors = (grad_loss, grad_lse, logits, target, lse, weight)
    write = prepare_backward(dense_rows(logits.shape), *tensors, *options, divisor=divisor)
    return into_empty(logits, write)


@InTwoSteps
def cross_entropy_backward_(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Callable[..., None]:
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    view, tensors = rows(logits), (grad_loss, grad_lse, logits, target, lse, weight)
    if view.tensor is not logits:
        return copied_to_logits(cross_entropy_backward)
    write = prepare_backward(view[2:], *tensors, *options, divisor=divisor)
    return over_logits(write)


@InTwoSteps
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
) -> Callable[..., Tensor]:
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    tensors = (grad_loss, grad_lse, logits, target, lse, weight)
    write = prepare_backward(dense_rows(logits.shape), *tensors, *options, grad_entropy)
    empty, gradient = empty_like(logits), place(logits.shape, logits.dtype)

    def backward(
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        entropy: Tensor,
        weight: Tensor | None = None,
        **_options: Any,
    ) -> Tensor:
        rest = (logits, target, lse, weight)
        return write(empty(*gradient), grad_loss, grad_lse, *rest, grad_entropy=grad_entropy, entropy=entropy)

    return backward
