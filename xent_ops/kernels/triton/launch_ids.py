"""Launcher of the gradient of several classes a row; see launch.py."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from ..options import DEFAULTS, RowOptions
from ..rows import dense_like
from ..sizes import size_hint
from .cached import Launch
from .common import Run, launcher, row_layout
from .ids import ids_grad_kernel

_PAIRS = 4096  # pairs of a row's ids that are compared at a time: 16 registers a thread


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
    number, strides, as_rows, _ = layout
    if size_hint(number) == 0 or grad_logits.shape[-1] == 0:
        return lambda *_: None
    ids_per_row = ids.shape[-1]
    size = next_power_of_2(ids_per_row)
    ignore_index, _, softcap, scale = options.kernel_arguments()
    numbers = (grad_logits.shape[-1], ids_per_row, *strides, class_start, ignore_index, softcap, scale)
    launch = Launch(
        ids_grad_kernel,
        number,
        *numbers,
        HAS_SOFTCAP=options.softcap is not None,
        HAS_ENTROPY=grad_entropy is not None,
        WIDTH=size,
        STEP=max(min(_PAIRS // size, size), 1),
        num_warps=8 if size >= 64 else 1,
        num_stages=1,
    )
    as_ids, as_at, as_grads = dense_like(ids), dense_like(at_ids), dense_like(grad_ids)
    as_lse, as_grad_lse = dense_like(lse), dense_like(grad_lse)
    as_entropy, as_grad_entropy = (None if value is None else dense_like(value) for value in (entropy, grad_entropy))

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
        c = flat_lse if grad_entropy is None or as_grad_entropy is None else as_grad_entropy(grad_entropy)
        h = flat_lse if entropy is None or as_entropy is None else as_entropy(entropy)
        launch(written, as_ids(ids), as_at(at_ids), as_grads(grad_ids), as_grad_lse(grad_lse), flat_lse, c, h)
        if written is grad_logits:
            torch.autograd.graph.increment_version(grad_logits)  # autograd does not see a launch
        else:
            grad_logits.copy_(written.view(grad_logits.shape))

    return run
