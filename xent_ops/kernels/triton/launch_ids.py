"""Launchers of several classes a row; see launch.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton import next_power_of_2

from ..options import DEFAULTS, RowOptions
from ..reference import accumulator
from ..reference_top_k_distillation import MOST, MOST_PER_NAT
from ..rows import dense_like, optional_like
from ..sizes import size_hint
from .cached import Launch
from .common import Run, launcher, mark_written, new_tensor, row_layout
from .flags import flags_of
from .ids import ids_forward_kernel, ids_grad_kernel, row_targets_kernel, top_k_distillation_kernel

_PAIRS = 4096  # pairs of a row's ids that are compared at a time: 16 registers a thread


@launcher
def row_targets(ids: Tensor, *, options: RowOptions = DEFAULTS) -> Run:
    shape, ids_per_row = ids.shape[:-1], ids.shape[-1]
    new_target, as_ids, number = new_tensor(shape, torch.int64, ids.device), dense_like(ids), shape.numel()
    if size_hint(number) == 0:
        return lambda *_: new_target()
    tiling = {"WIDTH": next_power_of_2(ids_per_row), "num_warps": 1, "num_stages": 1}
    launch = Launch(row_targets_kernel, number, ids_per_row, options.ignore_index, **tiling)

    def run(ids: Tensor) -> Tensor:
        target = new_target()
        launch(as_ids(ids), target)
        return target

    return run


def _forward(
    logits: Tensor, ids: Tensor, class_start: int, num_classes: int | None, options: RowOptions, mask: int
) -> Run:
    layout, new_at_ids = row_layout(logits), new_tensor(ids.shape, accumulator(logits), logits.device)
    if size_hint(layout.number) == 0:
        return lambda *_: new_at_ids()
    columns, ids_per_row = logits.shape[-1], ids.shape[-1]
    ignore_index, _, softcap, scale = options.kernel_arguments()
    classes = columns if num_classes is None else num_classes
    numbers = (columns, ids_per_row, *layout.strides, class_start, classes, ignore_index, softcap, scale)
    size = next_power_of_2(ids_per_row)
    tiling = {"WIDTH": size, "num_warps": 4 if size >= 128 else 1, "num_stages": 1}
    flags = flags_of(options, False, logits.element_size())
    launch = Launch(ids_forward_kernel, layout.number, *numbers, FLAGS=flags, MASK=mask, **tiling)
    as_rows, as_ids = layout.as_rows, dense_like(ids)

    def run(logits: Tensor, ids: Tensor, *_: int | None) -> Tensor:
        read, at_ids = as_rows(logits), new_at_ids()
        launch(read, as_ids(ids), at_ids)
        if mask:
            mark_written(read, logits)
        return at_ids

    return run


@launcher
def ids_forward(
    logits: Tensor, ids: Tensor, class_start: int = 0, num_classes: int | None = None, *, options: RowOptions = DEFAULTS
) -> Run:
    return _forward(logits, ids, class_start, num_classes, options, 0)


@launcher
def mask_ids_(
    logits: Tensor, ids: Tensor, class_start: int = 0, num_classes: int | None = None, *, options: RowOptions = DEFAULTS
) -> Run:
    return _forward(logits, ids, class_start, num_classes, options, -1 if options.is_increasing else 1)


@launcher
def top_k_distillation(
    at_ids: Tensor,
    lse: Tensor,
    ids: Tensor,
    probs: Tensor,
    token_weight: Tensor | None = None,
    tail: bool = False,
    lse_low: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> Run:
    dtype, device, ids_per_row, number = at_ids.dtype, at_ids.device, ids.shape[-1], lse.numel()
    new_row, new_ids = new_tensor(lse.shape, dtype, device), new_tensor(ids.shape, dtype, device)
    if size_hint(number) == 0:
        return lambda *_: (new_row(), new_ids(), new_row())
    strides, as_at = _strided(at_ids)
    numbers = (ids_per_row, *strides, options.ignore_index, MOST, MOST_PER_NAT, lse_square_scale)
    flags = {"TAIL": tail, "WEIGHTED": token_weight is not None, "LSE_LOW": lse_low is not None}
    flags["LSE_SQUARE"] = lse_square_scale != 0.0
    launch = Launch(top_k_distillation_kernel, number, *numbers, **flags, **_pairs(ids_per_row), num_stages=1)
    as_lse, as_ids, as_probs = dense_like(lse), dense_like(ids), dense_like(probs)
    as_tokens, as_low = optional_like(token_weight), optional_like(lse_low)

    def run(
        at_ids: Tensor,
        lse: Tensor,
        ids: Tensor,
        probs: Tensor,
        token_weight: Tensor | None = None,
        tail: bool = False,
        lse_low: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss, grad_ids, grad_lse = new_row(), new_ids(), new_row()
        optional = (as_tokens(token_weight, lse), as_low(lse_low, lse))
        launch(as_at(at_ids), as_lse(lse), as_ids(ids), as_probs(probs), *optional, loss, grad_ids, grad_lse)
        return loss, grad_ids, grad_lse

    return run


def _strided(at_ids: Tensor) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """The strides (of a row, of an id) and the tensor: a chunk's statistics have the ids before the rows."""
    if at_ids.dim() == 2:
        return at_ids.stride(), lambda tensor: tensor
    return (at_ids.shape[-1], 1), dense_like(at_ids)


def _pairs(ids_per_row: int) -> dict[str, int]:
    size = next_power_of_2(ids_per_row)
    return {"WIDTH": size, "STEP": max(min(_PAIRS // size, size), 1), "num_warps": 8 if size >= 64 else 1}


@launcher
def ids_grad_(
    grad_logits: Tensor,
    ids: Tensor,
    at_ids: Tensor,
    grad_ids: Tensor,
    grad_lse: Tensor,
    lse: Tensor,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> Run:
    layout = row_layout(grad_logits)
    number, strides, as_rows = layout
    if size_hint(number) == 0 or grad_logits.shape[-1] == 0:
        return lambda *_: None
    ids_per_row = ids.shape[-1]
    ignore_index, _, softcap, scale = options.kernel_arguments()
    at_strides, as_at = _strided(at_ids)
    numbers = (grad_logits.shape[-1], ids_per_row, *strides, *at_strides, class_start, ignore_index, softcap, scale)
    launch = Launch(
        ids_grad_kernel,
        number,
        *numbers,
        HAS_SOFTCAP=options.softcap is not None,
        HAS_ENTROPY=grad_entropy is not None,
        **_pairs(ids_per_row),
        num_stages=1,
    )
    as_ids, as_grads = dense_like(ids), dense_like(grad_ids)
    as_lse, as_grad_lse = dense_like(lse), dense_like(grad_lse)
    as_entropy, as_grad_entropy = optional_like(entropy), optional_like(grad_entropy)

    def run(
        grad_logits: Tensor,
        ids: Tensor,
        at_ids: Tensor,
        grad_ids: Tensor,
        grad_lse: Tensor,
        lse: Tensor,
        grad_entropy: Tensor | None = None,
        entropy: Tensor | None = None,
        *_: int | None,
    ) -> None:
        written, flat_lse = as_rows(grad_logits), as_lse(lse)
        entropy_args = (as_grad_entropy(grad_entropy, flat_lse), as_entropy(entropy, flat_lse))
        row_args = (as_grads(grad_ids), as_grad_lse(grad_lse), flat_lse, *entropy_args)
        launch(written, as_ids(ids), as_at(at_ids), *row_args)
        mark_written(written, grad_logits)

    return run
