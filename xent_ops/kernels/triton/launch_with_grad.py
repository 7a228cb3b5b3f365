"""Launchers of the one-pass operators; see launch.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from .. import accelerators
from ..accelerators import processors
from ..options import DEFAULTS, RowOptions
from ..reference import accumulator, grad_lse_of_square
from ..rows import dense_like, is_narrower, per_row_like
from ..sizes import size_hint, size_to_serve
from . import configs
from .cached import Launch
from .common import (
    RowLayout,
    Run,
    Strides,
    class_weights,
    edges,
    launcher,
    launcher_with_in_place_form,
    mark_written,
    new_tensor,
    row_layout,
)
from .flags import flags_of
from .launch_backward import cross_entropy_backward
from .launch_forward import new_statistics, prepare_forward
from .recording import RECORDING
from .with_grad import scale_kernel, with_grad_kernel


def _shared_memory(device: torch.device) -> tuple[int, int]:
    """(bytes of shared memory for a row, most programs for one row); zeros if with_grad_shared.py cannot run.

    Programs that share a row wait for each other, so all must fit on the device at once, beside the programs of other
    streams: at most a quarter of the number of processors.
    """
    accelerator = accelerators.of(device)
    if accelerator is None or (accelerator.capability(device) or (0, 0)) < (8, 0):
        return 0, 0
    if RECORDING.get():  # Inductor writes kernels of Triton, and this one is of Gluon
        return 0, 0
    try:
        from . import with_grad_shared  # noqa: F401
    except (ImportError, AttributeError):  # Gluon is experimental: another Triton may lack these names
        return 0, 0
    properties = accelerator.properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0), max(properties.multi_processor_count // 4, 1)


class _Call(NamedTuple):
    """The arguments of the first stage."""

    logits: Tensor
    layout: RowLayout  # of the logits
    out_strides: Strides  # strides of the rows that the gradient is written to
    target: Tensor
    grad_scale: Tensor
    grad_lse_square: Tensor | None
    weight: Tensor | None
    with_argmax: bool
    with_entropy: bool
    grad_dtype: torch.dtype | None
    options: RowOptions
    narrow: bool = False  # the gradient is written to the front of each row of logits


# ``kernel(outputs, gradient, logits, target, grad_scale, grad_lse_square, weight)`` writes (loss, lse, argmax, entropy)
# and the gradient, of logits with that layout.
Kernel = Callable[..., None]


def _prepare_with_grad(call: _Call) -> Kernel:
    logits, number = call.logits, call.layout.number
    if size_hint(number) == 0:
        return lambda *_tensors: None
    shared = _prepare_shared(call)
    # With one program for each row, some processors would be idle.
    few = size_hint(number) < processors(logits.device) or is_narrower(call.grad_dtype, logits)
    general = _prepare_two_visits(call) if few else _prepare_launch(call, None)
    if shared is None:
        return general

    def choose(outputs: tuple[Tensor, ...], gradient: Tensor, logits: Tensor, *args: Tensor | None) -> None:
        kernel = general if logits.data_ptr() % 16 else shared
        kernel(outputs, gradient, logits, *args)

    return choose


def _prepare_shared(call: _Call) -> Kernel | None:
    """The kernel that keeps a row in shared memory, or None if it cannot run."""
    logits, strides, options = call.logits, call.layout.strides, call.options
    classes, itemsize = logits.shape[-1], logits.element_size()
    plain = call.weight is None and options.plain_scale is not None
    same_rows = strides == call.out_strides
    # Copies to shared memory take whole 16-byte vectors.
    written = itemsize if call.grad_dtype is None else call.grad_dtype.itemsize
    vectors = (same_rows and written == itemsize) or not edges(classes, written, strides, call.out_strides)
    if not (plain and itemsize < 8 and vectors):
        return None
    config = configs.with_grad_shared(classes, itemsize, *_shared_memory(logits.device))
    return None if config is None else _prepare_launch(call, config)


def _prepare_launch(call: _Call, shared: configs.Shared | None) -> Kernel:
    """A launch of one kernel, from with_grad_shared.py or with_grad.py."""
    logits, (number, strides, _), out_strides = call.logits, call.layout, call.out_strides
    classes, itemsize, weighted = logits.shape[-1], logits.element_size(), call.weight is not None
    options = call.options
    as_scale, scale_stride = per_row_like(call.grad_scale)
    as_square, square_stride = per_row_like(call.grad_lse_square)
    as_targets = dense_like(call.target)
    border = edges(classes, itemsize, strides, out_strides)
    numbers = (classes, *strides, *out_strides, scale_stride, square_stride, options.ignore_index)
    with_square = call.grad_lse_square is not None
    tiling: dict[str, Any] = {"EDGES": border, "VECTOR": configs.vector(itemsize)}
    words, parts = 0, 0  # words that programs exchange; parts of a row, if their statistics are joined
    if shared is not None:
        from .with_grad_shared import join_statistics_kernel, with_grad_shared_kernel

        tiling |= {"PARTS": shared.parts, "TILE": shared.tile, "TILES": shared.tiles, "WARPS": shared.num_warps}
        programs = number * shared.parts
        launch = Launch(
            with_grad_shared_kernel,
            programs,
            *numbers,
            options.plain_scale,
            HAS_LSE_SQUARE=with_square,
            STATISTICS=call.with_argmax or call.with_entropy,
            num_warps=shared.num_warps,
            **tiling,
        )
        if shared.parts > 1:
            words = 1 + programs
        if call.with_argmax or call.with_entropy:
            parts = shared.parts
            flags = {"PARTS": parts, "SLOTS": next_power_of_2(parts)}
            flags |= {"ARGMAX": call.with_argmax, "ENTROPY": call.with_entropy}
            join = Launch(join_statistics_kernel, number, classes, **flags, num_warps=1, num_stages=1)
            new_tops = new_tensor((number, parts), torch.float32, logits.device)
            new_firsts = new_tensor((number, parts), torch.int32, logits.device)
    else:
        config = configs.with_grad(classes, itemsize)
        launch = Launch(
            with_grad_kernel,
            number,
            *numbers,
            *options.kernel_arguments()[1:],
            FLAGS=flags_of(options, weighted, itemsize)._replace(
                lse_square=with_square, skip_ignored=True, argmax=call.with_argmax, entropy=call.with_entropy
            ),
            SAME_ROWS=strides == out_strides,
            BLOCK=config.block,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **tiling,
        )

    def kernel(
        outputs: tuple[Tensor, ...],
        gradient: Tensor,
        logits: Tensor,
        target: Tensor,
        grad_scale: Tensor,
        grad_lse_square: Tensor | None,
        weight: Tensor | None,
    ) -> None:
        lse = outputs[1]
        if words:
            extra = torch.zeros(words, dtype=torch.int64, device=lse.device)
        else:
            extra = class_weights(weight, lse, options.label_smoothing > 0.0 and border != 0)
        square = lse if grad_lse_square is None else as_square(grad_lse_square)
        row_tensors = outputs
        if parts:
            row_tensors = (*outputs[:2], new_tops(), new_firsts(), new_tops())
        elif shared is not None:
            row_tensors = (*outputs[:2], lse, lse, lse)
        launch(logits, as_targets(target), as_scale(grad_scale), square, extra, *row_tensors, gradient)
        if parts:
            join(*row_tensors[2:], *outputs[2:])

    return kernel


def _prepare_two_visits(call: _Call) -> Kernel:
    """Forward and backward, each over many programs. Few rows are still in the L2 cache at the second pass."""
    logits, target, weight, options = call.logits, call.target, call.weight, call.options
    row = torch.empty(tuple(logits.shape[:-1]), dtype=accumulator(logits), device="meta")  # like the lse
    forward = prepare_forward(logits, target, weight, options, call.with_argmax, call.with_entropy, skip_ignored=True)
    grad_lse = None if call.grad_lse_square is None else row
    backward_args = (call.grad_scale, grad_lse, logits, target, row, weight)
    keywords = {"lse_low": row, "grad_dtype": call.grad_dtype, "options": options, "narrow": call.narrow}
    backward = cross_entropy_backward(call.out_strides, *backward_args, **keywords)

    def kernel(
        outputs: tuple[Tensor, ...],
        gradient: Tensor,
        logits: Tensor,
        target: Tensor,
        grad_scale: Tensor,
        grad_lse_square: Tensor | None,
        weight: Tensor | None,
    ) -> None:
        lse, lse_low = outputs[1], torch.empty_like(outputs[1])
        forward(logits, target, weight, *outputs, lse_low)
        grad_lse = grad_lse_of_square(grad_lse_square, lse, target, options.ignore_index)
        backward(gradient, grad_scale, grad_lse, logits, target, lse, weight, lse_low=lse_low)

    return kernel


@launcher_with_in_place_form
def cross_entropy_with_grad(
    out_strides: Strides,
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None = None,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    grad_dtype: torch.dtype | None = None,
    *,
    options: RowOptions = DEFAULTS,
    narrow: bool = False,
) -> Run:
    call_args = (target, grad_scale, grad_lse_square, weight, with_argmax, with_entropy, grad_dtype)
    layout = row_layout(logits)
    kernel = _prepare_with_grad(_Call(logits, layout, out_strides, *call_args, options, narrow))
    as_rows, new_outputs = layout.as_rows, new_statistics(logits, with_argmax, with_entropy)

    def write(
        gradient: Tensor,
        logits: Tensor,
        target: Tensor,
        grad_scale: Tensor,
        grad_lse_square: Tensor | None = None,
        weight: Tensor | None = None,
        *_: Any,
    ) -> tuple[Tensor, ...]:
        outputs = new_outputs()
        kernel(outputs, gradient, as_rows(logits), target, grad_scale, grad_lse_square, weight)
        return outputs

    return write


@launcher
def scale_grad_(grad: Tensor, factor: Tensor) -> Run:
    number, strides, as_rows = row_layout(grad)
    if size_hint(number) == 0:
        return lambda _grad, _factor: None
    classes = grad.shape[-1]
    config = configs.backward(classes, grad.element_size())
    blocks = -(-classes // config.block)
    tiles = number * blocks
    most = 8 * processors(grad.device)
    as_factor, stride = per_row_like(factor)
    launch = Launch(
        scale_kernel,
        min(size_to_serve(tiles, most), most),  # programs that share all tiles
        tiles,
        classes,
        blocks,
        *strides,
        stride,
        PER_ROW=stride != 0,
        BLOCK=config.block,
        num_warps=config.num_warps,
        num_stages=1,
    )

    def run(grad: Tensor, factor: Tensor) -> None:
        written = as_rows(grad)
        launch(written, as_factor(factor))
        mark_written(written, grad)

    return run
