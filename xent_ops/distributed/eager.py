"""Eager training over a split vocabulary: the whole loss as one node of autograd, as in ops/eager.py.

The same operators and the same all-gather, called below autograd; the reductions take one launch where they can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.composite import Counts, reduce_rows
from ..ops.eager import Settings, kernels_for, upstream
from ..ops.library import prepared_launcher
from .groups import Place
from .parts import counts_of, everyones_parts


def _reduce(
    loss: Tensor, lse: Tensor, target_weight: Tensor, target: Tensor, settings: Settings
) -> tuple[Tensor, Counts]:
    """The loss, and what the backward divides by."""
    reduction, lse_square_scale, options = settings
    if reduction == "mean" and lse_square_scale == 0.0:
        launcher = prepared_launcher(target, "launch_mean")
        if launcher is not None:
            value, weights = launcher.mean(loss, target_weight, None)
            return value, Counts(None, weights, weights)
    loss_options: dict[str, Any] = {"lse_square_scale": lse_square_scale, "reduction": reduction}
    counts = counts_of(target_weight, target, ignore_index=options["ignore_index"], **loss_options)
    return reduce_rows(loss, lse, counts, **loss_options).loss, counts


class Loss(torch.autograd.Function):
    """The reduced loss of a shard (..., columns) that requires grad; the caller has checked what operators do not."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        here: Place,
        start: int,
        num_classes: int,
        settings: Settings,
    ) -> Tensor:
        options = settings.options
        kernels = kernels_for(logits, target, weight, **options)
        everyones = everyones_parts(kernels, logits, target, weight, here, start, num_classes, options)
        loss, lse, target_weight, coefficient = kernels["cross_entropy_shard_join"](
            logits, target, everyones, start, num_classes, weight, **options
        )
        value, counts = _reduce(loss, lse, target_weight, target, settings)
        ctx.save_for_backward(logits, target, lse, weight, None if weight is None else coefficient, *counts)
        ctx.settings = settings
        ctx.place = start, num_classes
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse, weight, coefficient, *counts = ctx.saved_tensors
        grads = upstream(grad, lse, Counts(*counts), ctx.settings)
        if torch.is_grad_enabled():  # create_graph: the operator's formula says why there is no second derivative
            backward = torch.ops.xent.cross_entropy_shard_backward
        else:
            backward = kernels_for(grad, logits, target, lse, weight)["cross_entropy_shard_backward"]
        args = (*grads, logits, target, lse, *ctx.place, weight, coefficient)
        return backward(*args, **ctx.settings.options), *(None,) * 6
