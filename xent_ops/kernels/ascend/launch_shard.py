"""Launchers for a vocabulary that is split over ranks: a shard's part, and the join of all parts. See launch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference_shard
from ..options import DEFAULTS, RowOptions
from ..reference import columns_of
from ..rows import class_weight, rows
from . import configs
from .common import features, indices, launch, launcher
from .shard import join_shards_kernel, shard_kernel


@launcher
def cross_entropy_shard(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    batch_invariant: bool = False,  # a program computes whole rows in any case
    *,
    options: RowOptions = DEFAULTS,
) -> Tensor:
    columns, itemsize = columns_of(logits.shape[-1], class_start, num_classes), logits.element_size()
    view = rows(logits)
    out = logits.new_empty((1, reference_shard.width(view.number, weight is not None)), dtype=torch.float32)
    if view.number == 0:  # then nothing reads the header
        return out
    flags = features(weight, options, itemsize)
    launch(
        shard_kernel,
        view.number,
        (view.tensor, indices(target), class_weight(weight, out), out),
        columns,
        *view[2:],
        class_start,
        num_classes,
        *options.kernel_arguments()[1:],
        **flags,
        BLOCK=configs.block(columns, configs.forward_bytes(itemsize, **flags)),
    )
    return out


@launcher
def cross_entropy_shard_join(
    logits: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, ...]:
    results = tuple(gathered.new_empty(target.shape) for _ in range(5))  # loss, lse, w_t, lse_coefficient, lse_low
    number = target.numel()
    if number == 0:
        return results
    launch(
        join_shards_kernel,
        number,
        (gathered.contiguous(), indices(target), *results),
        gathered.shape[0],
        num_classes,
        options.ignore_index,
        options.label_smoothing,
        HAS_WEIGHT=weight is not None,
        HAS_SMOOTHING=options.label_smoothing > 0.0,
    )
    return results


@launcher
def cross_entropy_shard_reduced(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    """The kernel computes the rows, plain torch their sums."""
    return reference_shard.cross_entropy_shard_reduced(*args, **options, join=cross_entropy_shard_join)
