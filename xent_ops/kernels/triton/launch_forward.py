"""Launchers of the forward operators; see launch.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton import next_power_of_2

from ..accelerators import processors
from ..options import DEFAULTS, RowOptions
from ..reference import accumulator
from ..rows import dense_like
from ..sizes import size_hint
from . import configs
from .cached import Launch
from .common import RowLayout, Run, class_weights, edges, launcher, new_rows, new_tensor, realigned, row_layout
from .flags import Flags, flags_of
from .forward import forward_kernel
from .short import short_kernel
from .split_row import join_kernel, partial_kernel


def _prepare_kernels(
    logits: Tensor, layout: RowLayout, options: RowOptions, flags: Flags, whole_rows: bool
) -> Callable[..., None]:
    """``launch(logits, target, weights, loss, lse, argmax, entropy, lse_low)`` by the kernels that suit these rows.

    ``whole_rows``: one program computes a whole row, even if there are few rows.
    """
    number, strides = layout.number, layout.strides
    classes, itemsize = logits.shape[-1], logits.element_size()
    extra, load = flags.argmax or flags.entropy, configs.load(options, flags.weight)
    numbers = options.kernel_arguments()
    vector = configs.vector(itemsize)
    border = edges(classes, itemsize, strides)
    short = configs.short(classes, itemsize, extra, load, flags.smoothing)
    if short is not None and not border and options.is_increasing:
        tiling = {"ROWS": short.rows, "BLOCK": short.block, "VECTOR": vector, "num_warps": short.num_warps}
        programs = -(-number // short.rows)
        return Launch(short_kernel, programs, number, classes, *strides, *numbers, FLAGS=flags, **tiling, num_stages=1)
    config = configs.forward(classes, itemsize, extra, load)
    parts, part_classes = 1, classes
    if not whole_rows:
        config, parts, part_classes = configs.parts(size_hint(number), classes, config, processors(logits.device))
    tiling = {"EDGES": border, "BLOCK": config.block, "VECTOR": vector}
    tiling |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if parts == 1:
        return Launch(forward_kernel, number, classes, *strides, *numbers, FLAGS=flags, **tiling)
    parts_numbers = (classes, part_classes, parts, *strides, numbers[0], *numbers[2:])
    kernel = Launch(partial_kernel, number * parts, *parts_numbers, FLAGS=flags, **tiling)
    tiling = {"PARTS": next_power_of_2(parts), "num_warps": 1, "num_stages": 1}
    join = Launch(join_kernel, number, classes, parts, *strides, *numbers, FLAGS=flags, **tiling)
    new_sums = new_tensor((number, 6, parts), accumulator(logits), logits.device)
    new_first = new_tensor((number, parts), torch.int32, logits.device)

    def launch_parts(*tensors: Tensor) -> None:
        sums = first = new_sums()
        if flags.argmax:
            first = new_first()
        kernel(*tensors[:3], sums, first)
        join(*tensors[:3], sums, first, *tensors[3:])

    return launch_parts


def prepare_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: RowOptions,
    with_argmax: bool = False,
    with_entropy: bool = False,
    skip_ignored: bool = False,
    whole_rows: bool = False,
) -> Callable[..., None]:
    """``forward(logits, target, weight, loss, lse, argmax, entropy, lse_low)`` writes its last five arguments.

    ``skip_ignored``: the logits of ignored rows are not read; their lse is infinite, their argmax -1, their entropy 0.
    ``whole_rows``: as for ``_prepare_kernels``.
    """
    layout, launch = row_layout(logits), None
    if size_hint(layout.number) > 0:
        flags = flags_of(options, weight is not None, logits.element_size())
        flags = flags._replace(argmax=with_argmax, entropy=with_entropy, skip_ignored=skip_ignored, lse_low=True)
        launch = _prepare_kernels(logits, layout, options, flags, whole_rows)
    # Smoothing multiplies all weights by the logits beside them; without it only the target's weight is read.
    shifted = options.label_smoothing > 0.0 and edges(logits.shape[-1], logits.element_size(), layout.strides) != 0
    as_rows, as_targets = layout.as_rows, dense_like(target)

    def forward(logits: Tensor, target: Tensor, weight: Tensor | None, *outputs: Tensor) -> None:
        if launch is not None:
            weights = class_weights(weight, outputs[0], shifted)
            launch(as_rows(logits), as_targets(target), weights, *outputs)

    return forward


def new_statistics(logits: Tensor, with_argmax: bool, with_entropy: bool) -> Callable[[], tuple[Tensor, ...]]:
    """``new()`` -> loss, lse, argmax, entropy, for kernels to write; (0,) unless asked for."""
    shape, dtype, device = logits.shape[:-1], accumulator(logits), logits.device
    new_row = new_tensor(shape, dtype, device)
    new_argmax = new_tensor(shape if with_argmax else (0,), torch.int64, device)
    new_entropy = new_tensor(shape if with_entropy else (0,), dtype, device)
    return lambda: (new_row(), new_row(), new_argmax(), new_entropy())


@launcher
def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    batch_invariant: bool = False,
    skip_ignored: bool = False,
    *,
    options: RowOptions = DEFAULTS,
) -> Run:
    flags, keywords = (with_argmax, with_entropy), options.keywords()
    forward = prepare_forward(logits, target, weight, options, *flags, skip_ignored, batch_invariant)
    new_outputs, new_row = new_statistics(logits, with_argmax, with_entropy), new_rows(logits)

    def run(logits: Tensor, target: Tensor, weight: Tensor | None = None, *_: bool) -> tuple[Tensor, ...]:
        copy = realigned(logits) if batch_invariant else None
        if copy is not None:
            arguments = (copy, target, weight, *flags, batch_invariant, skip_ignored)
            return torch.ops.xent.cross_entropy_forward(*arguments, **keywords)
        outputs = (*new_outputs(), new_row())
        forward(logits, target, weight, *outputs)
        return outputs

    return run
