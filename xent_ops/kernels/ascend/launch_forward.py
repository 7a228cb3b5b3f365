"""Launchers of the forward operators. See launch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reductions
from ..options import DEFAULTS, RowOptions
from ..reference import is_counted
from ..rows import class_weight, rows
from . import configs
from .common import features, indices, launch, launcher
from .forward import forward_kernel


@launcher
def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    batch_invariant: bool = False,  # a program computes whole rows in any case
    skip_ignored: bool = False,
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, ...]:
    classes, itemsize = logits.shape[-1], logits.element_size()
    loss = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    lse, lse_low = torch.empty_like(loss), torch.empty_like(loss)
    argmax = torch.empty_like(loss, dtype=torch.int64) if with_argmax else loss.new_empty(0, dtype=torch.int64)
    entropy = torch.empty_like(loss) if with_entropy else loss.new_empty(0)
    view = rows(logits)
    if view.number == 0:
        return loss, lse, argmax, entropy, lse_low
    flags = {
        "SKIP_IGNORED": skip_ignored,
        **features(weight, options, itemsize),
        "HAS_ARGMAX": with_argmax,
        "HAS_ENTROPY": with_entropy,
    }
    launch(
        forward_kernel,
        view.number,
        (view.tensor, indices(target), class_weight(weight, lse), loss, lse, argmax, entropy, lse_low),
        classes,
        *view[2:],
        *options.kernel_arguments(),
        **flags,
        BLOCK=configs.block(classes, configs.forward_bytes(itemsize, **flags)),
    )
    if skip_ignored and with_argmax:  # the kernel fills in the rest
        argmax = torch.where(is_counted(target, options.ignore_index), argmax, -1)
    return loss, lse, argmax, entropy, lse_low


@launcher
def cross_entropy_reduced(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    """The kernel computes the rows, plain torch their sums."""
    return reductions.cross_entropy_reduced(*args, **options, forward=cross_entropy_forward)
