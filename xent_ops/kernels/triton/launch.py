"""From tensors to kernels: take strides, pick a config, allocate, launch. One function an operator, named as it is.

What follows from strides and options alone is made once and kept (``plan``, cached.py). Arguments have passed the
operators' checks. Nothing here synchronises, so that every launch can be captured in a CUDA graph. What is allocated is
an output, a few numbers a row or class, or, where no two strides describe the rows, a copy of the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference import accumulator
from ..rows import Rows, class_weight, dense, per_row, rows
from . import configs
from .backward import backward_kernel
from .cached import Bound, Launch, plan
from .common import Strides, class_weights, edges, empty_grad, empty_rows, on_device_of, processors
from .forward import forward_kernel
from .launch_mean import count
from .short import short_kernel
from .split_row import join_kernel, partial_kernel


class Shard(NamedTuple):
    """Where a rank's logits lie in a vocabulary split over ranks."""

    class_start: int
    num_classes: int
    coefficient: Tensor | None  # see reference_shard.py


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


def run_forward(
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
    loss = empty_rows(logits)
    lse = torch.empty_like(loss)
    argmax = torch.empty_like(loss, dtype=torch.int64) if with_argmax else lse
    entropy = torch.empty_like(loss) if with_entropy else lse
    outputs = (loss, lse, argmax, entropy)
    view = rows(logits)
    if view.number > 0:
        options = (ignore_index, label_smoothing, softcap, logit_scale)
        launches = forward_launches(view, weight is not None, with_argmax, with_entropy, *options)
        with on_device_of(logits):
            weights = class_weights(weight, lse, label_smoothing, logits.element_size(), view[2:])
            launches(view.number, (view.tensor, dense(target), weights), outputs)
    return outputs


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
    return run_forward(logits, target, weight, ignore_index, label_smoothing, softcap, logit_scale)[:2]


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
    return run_forward(logits, target, weight, *options, with_argmax=True)[:3]


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
    loss, lse, _, entropy = run_forward(logits, target, weight, *options, with_entropy=True)
    return loss, lse, entropy


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


def run_backward(
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
    divisor: Tensor | None = None,
) -> None:
    view, out = rows(logits), rows(grad)
    if view.number == 0:
        return
    lse = dense(lse.to(accumulator(logits)))  # in whose dtype the kernel computes
    weight_sum = lse
    if shard is not None:
        weight_sum = lse if shard.coefficient is None else dense(shard.coefficient)
    elif weight is not None and label_smoothing > 0.0:
        # Not torch's sum, which may take four times as long: 32 us for 128256 weights.
        weight = class_weight(weight, lse)
        weight_sum = count(weight, None, lse.dtype)[1]
    weights = class_weights(weight, lse, label_smoothing, logits.element_size(), view[2:], out[2:])
    grad_loss, grad_loss_stride = per_row(grad_loss, lse)
    grad_lse_row, grad_lse_stride = per_row(grad_lse, lse)
    grad_entropy_row, grad_entropy_stride = per_row(grad_entropy, lse)
    blocks, launch = backward_launch(
        view[2:],
        out[2:],
        logits.shape[-1],
        logits.element_size(),
        (grad_loss_stride, grad_lse_stride, grad_entropy_stride),
        grad_lse is not None,
        grad_entropy is not None,
        weight is not None,
        None if shard is None else shard[:2],
        ignore_index,
        label_smoothing,
        softcap,
        logit_scale,
        divisor is not None,
    )
    with on_device_of(logits):
        launch(
            view.number * blocks,
            grad_loss,
            lse if divisor is None else divisor,
            grad_lse_row,
            grad_entropy_row,
            view.tensor,
            dense(target),
            lse,
            lse if entropy is None else dense(entropy),
            weights,
            weight_sum,
            out.tensor,
        )


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
) -> Tensor:
    grad = empty_grad(logits)
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    run_backward(grad, grad_loss, grad_lse, logits, target, lse, weight, *options, divisor=divisor)
    return grad


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
) -> None:
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    if rows(logits).tensor is logits:
        run_backward(logits, grad_loss, grad_lse, logits, target, lse, weight, *options, divisor=divisor)
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
                divisor,
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
    grad = empty_grad(logits)
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    run_backward(grad, grad_loss, grad_lse, logits, target, lse, weight, *options, grad_entropy, entropy)
    return grad
