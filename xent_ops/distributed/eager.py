"""Eager training over a split vocabulary: the whole loss as one node of autograd, as in ops/eager.py.

The same kernels, called below autograd, and an all-gather that no tracer sees; the reductions take one launch where
they can.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions

from ..kernels import reference_shard
from ..ops import checks, transforms
from ..ops.composite import Counts, reduce_rows
from ..ops.eager import Prepared, Settings, apply_prepared, kernels_for, prepared_for, upstream
from ..ops.library import prepared_launcher
from .groups import Place, process_group
from .parts import counts_of, everyones_parts, first_class

# What dist.all_gather_into_tensor comes to, which asks so much before that it takes an H200's host 40 us instead of 30.
_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"  # before torch 2.13
_ON_THIS_STREAM = AllgatherOptions()
_ON_THIS_STREAM.asyncOp = False


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
        return apply_prepared(logits, target, prepared)
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
    work = getattr(process_group(group), _GATHER)(everyones, parts, _ON_THIS_STREAM)
    if work is not None:
        work.wait()


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


def _join(
    kernels: Any,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    everyones: Tensor,
    place: tuple[int, int],
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor | None, Counts]:
    """(loss, lse, with class weights the coefficient, what the backward divides by)"""
    reduction, lse_square_scale, options = settings
    plain = reduction != "none" and lse_square_scale == 0.0
    if plain and weight is None:
        launcher = prepared_launcher(target, "launch_shard")
        if launcher is not None:
            mean = reduction == "mean"
            value, number, lse = launcher.join_and_reduce(target, everyones, place[1], mean, **options)
            return value, lse, None, Counts(None, number, number) if mean else Counts(None, None, None)
    loss, lse, target_weight, coefficient = kernels["cross_entropy_shard_join"](
        logits, target, everyones, *place, weight, **options
    )
    coefficient = None if weight is None else coefficient
    if plain and reduction == "mean":
        launcher = prepared_launcher(target, "launch_mean")
        if launcher is not None:
            value, weights = launcher.mean(loss, target_weight, None)
            return value, lse, coefficient, Counts(None, weights, weights)
    loss_options: dict[str, Any] = {"lse_square_scale": lse_square_scale, "reduction": reduction}
    counts = counts_of(target_weight, target, ignore_index=options["ignore_index"], **loss_options)
    return reduce_rows(loss, lse, counts, **loss_options).loss, lse, coefficient, counts


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
        place = start, num_classes
        value, lse, coefficient, counts = _join(kernels, logits, target, weight, everyones, place, settings)
        ctx.save_for_backward(logits, target, lse, weight, coefficient, *counts)
        ctx.settings = settings
        ctx.place = place
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse, weight, coefficient, *counts = ctx.saved_tensors
        rest = (weight, coefficient, Counts(*counts), ctx.place, ctx.settings)
        return _gradient(grad, logits, target, lse, *rest), *(None,) * 6
