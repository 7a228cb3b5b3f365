"""Eager training over a split vocabulary: the whole loss as one node of autograd, as in ops/eager.py.

The same kernels, called below autograd, and an all-gather that no tracer sees; the reductions take one launch where
they can.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import reference_shard
from ..ops import checks, transforms
from ..ops.composite import Counts, reduce_rows
from ..ops.eager import Prepared, PreparedLoss, Settings, kernels_for, prepared_for, upstream
from ..ops.library import prepared_launcher
from .groups import Place, process_group
from .parts import counts_of, everyones_parts, first_class

# Its name from torch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    here: Place,
    class_start: int | None,
    num_classes: int,
    settings: Settings,
) -> Tensor:
    """The reduced loss of a shard (..., columns) that requires grad."""
    checks.weight_without_grad(weight)
    prepared = prepared_for(_prepare, logits, target, weight, settings, here, class_start, num_classes)
    if prepared is not None:
        return PreparedLoss.apply(logits, target, prepared)
    start = first_class(logits.shape[-1], class_start, num_classes, here)
    return _Loss.apply(logits, target, weight, here, start, num_classes, settings)


def _gather(parts: Tensor, here: Place) -> Tensor:
    """Not by the functional collective (parts.traced_gather), for nobody looks: it takes the host twice as long."""
    if here.world == 1:
        return parts
    everyones = torch.empty((here.world, parts.shape[1]), dtype=parts.dtype, device=parts.device)
    _gather_into(everyones, parts, here.name)
    return everyones


def _gather_into(everyones: Tensor, parts: Tensor, group: str) -> None:
    """The group is looked up at each call: another one may have its name by now."""
    _all_gather(everyones, parts, group=process_group(group))


def _prepare(
    launcher: Any,
    facts: tuple[Any, ...],
    logits: Tensor,
    target: Tensor,
    settings: Settings,
    here: Place,
    class_start: int | None,
    num_classes: int,
) -> Prepared | None:
    place = (first_class(logits.shape[-1], class_start, num_classes, here), num_classes)
    checks.shard(logits, target, *place, **settings.options)
    gathering = {"world": here.world, "gather": functools.partial(_gather_into, group=here.name)}
    launches = launcher.prepare_shard(
        logits, target, settings.reduction == "mean", *place, **gathering, **settings.options
    )

    def gradient(grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, counts: Counts) -> Tensor:
        return _gradient(grad, logits, target, lse, None, None, counts, place, settings)

    return launches and Prepared(facts, launches, gradient)


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


def _gradient(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None,
    coefficient: Tensor | None,
    counts: Counts,
    place: tuple[int, int],
    settings: Settings,
) -> Tensor:
    backward: Any
    if torch.is_grad_enabled():  # create_graph: the operator's formula says why there is no second derivative
        backward = torch.ops.xent.cross_entropy_shard_backward
    elif transforms.forward_mode():  # the upstream gradient has a tangent, which operators would drop
        backward = reference_shard.cross_entropy_shard_backward
    else:
        backward = kernels_for(grad, logits, target, lse, weight)["cross_entropy_shard_backward"]
    grads = upstream(grad, lse, counts, settings)
    return backward(*grads, logits, target, lse, *place, weight, coefficient, **settings.options)


class _Loss(torch.autograd.Function):
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
        everyones = everyones_parts(kernels, logits, target, weight, here, start, num_classes, options, _gather)
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
        rest = (weight, coefficient, Counts(*counts), ctx.place, ctx.settings)
        return _gradient(grad, logits, target, lse, *rest), *(None,) * 6
