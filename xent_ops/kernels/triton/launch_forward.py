"""Launchers of the forward operators; see launch.py for what launchers share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton import next_power_of_2

from ..options import DEFAULTS, Options
from ..rows import dense_like
from . import configs
from .cached import Launch
from .common import RowLayout, Run, class_weights, edges, launcher, new_rows, processors, row_layout
from .flags import flags_of
from .forward import forward_kernel
from .short import short_kernel
from .split_row import join_kernel, partial_kernel


def _prepare_kernels(
    logits: Tensor, layout: RowLayout, options: Options, weighted: bool, with_argmax: bool, with_entropy: bool
) -> Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]:
    """``launch((logits, target, weights), (loss, lse, argmax, entropy))`` by the kernels that suit these rows."""
    number, strides = layout.number, layout.strides
    classes, itemsize = logits.shape[-1], logits.element_size()
    extra, smoothing = with_argmax or with_entropy, options.label_smoothing > 0.0
    load = configs.load(options, weighted)
    numbers = options.numbers()
    flags = flags_of(options, weighted, itemsize)._replace(argmax=with_argmax, entropy=with_entropy)
    vector = configs.vector(itemsize)
    border = edges(classes, itemsize, strides)
    short = configs.short(classes, itemsize, extra, load, smoothing)
    if short is not None and not border and options.logit_scale > 0.0:
        tiling = {"ROWS": short.rows, "BLOCK": short.block, "VECTOR": vector, "num_warps": short.num_warps}
        programs = -(-number // short.rows)
        kernel = Launch(
            short_kernel, programs, number, classes, *strides, *numbers, FLAGS=flags, **tiling, num_stages=1
        )
        return lambda inputs, outputs: kernel(*inputs, *outputs)
    config = configs.forward(classes, itemsize, extra, load)
    config, parts, part_classes = configs.parts(number, classes, config, processors(logits.device))
    tiling = {"EDGES": border, "BLOCK": config.block, "VECTOR": vector}
    tiling |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if parts == 1:
        kernel = Launch(forward_kernel, number, classes, *strides, *numbers, FLAGS=flags, **tiling)
        return lambda inputs, outputs: kernel(*inputs, *outputs)
    parts_numbers = (classes, part_classes, parts, *strides, *numbers[2:])
    kernel = Launch(partial_kernel, number * parts, *parts_numbers, FLAGS=flags, **tiling)
    tiling = {"PARTS": next_power_of_2(parts), "num_warps": 1, "num_stages": 1}
    join = Launch(join_kernel, number, classes, parts, *strides, *numbers, FLAGS=flags, **tiling)

    def launch_parts(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        lse = outputs[1]
        sums = first = torch.empty((number, 6, parts), dtype=lse.dtype, device=lse.device)
        if with_argmax:
            first = torch.empty((number, parts), dtype=torch.int32, device=lse.device)
        kernel(*inputs, sums, first)
        join(*inputs, sums, first, *outputs)

    return launch_parts


def prepare_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Options,
    with_argmax: bool = False,
    with_entropy: bool = False,
) -> Callable[..., tuple[Tensor, ...]]:
    """``forward(logits, target, weight)`` -> (loss, lse), and argmax or entropy."""
    layout, weighted = row_layout(logits), weight is not None
    launch = None
    if layout.number > 0:
        launch = _prepare_kernels(logits, layout, options, weighted, with_argmax, with_entropy)
    # Where weights are multiplied by what is read beside them; else only the target's is read.
    shifted = options.label_smoothing > 0.0 and edges(logits.shape[-1], logits.element_size(), layout.strides) != 0
    as_rows, as_targets = layout.as_rows, dense_like(target)
    new_row, new_argmax = new_rows(logits), new_rows(logits, torch.int64)

    def forward(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        loss, lse = new_row(), new_row()
        argmax = new_argmax() if with_argmax else lse
        entropy = new_row() if with_entropy else lse
        if launch is not None:
            inputs = (as_rows(logits), as_targets(target), class_weights(weight, lse, shifted))
            launch(inputs, (loss, lse, argmax, entropy))
        if with_argmax:
            return loss, lse, argmax
        return (loss, lse, entropy) if with_entropy else (loss, lse)

    return forward


@launcher
def cross_entropy_forward(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, options: Options = DEFAULTS
) -> Run:
    return prepare_forward(logits, target, weight, options)


@launcher
def cross_entropy_forward_argmax(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, options: Options = DEFAULTS
) -> Run:
    return prepare_forward(logits, target, weight, options, with_argmax=True)


@launcher
def cross_entropy_forward_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, options: Options = DEFAULTS
) -> Run:
    return prepare_forward(logits, target, weight, options, with_entropy=True)
