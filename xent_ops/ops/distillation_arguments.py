"""Converts the users' arguments of distillation to the operators', for one rank and for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.divergences import Divergences, FixedLoss
from . import arguments, distillation_checks


def target_of(
    target: Any,
    ignore_index: Any,
    hard_weight: Any,
    input: Any,
    parts: int = 1,  # ranks that have a part of the input each
    row_tensors: Any = (),  # with all rows: token_weight, or a user's rows
    reduction: Any = "mean",
) -> tuple[Any, Any]:
    """(target, ignore_index). Without a target: one that ignores nothing, for all rows."""
    if target is not None:
        return target, ignore_index
    if arguments.number("hard_weight", hard_weight) != 0.0:
        raise ValueError(f"hard_weight={hard_weight} is of the cross entropy on the target: pass target=")
    if arguments.integer("ignore_index", ignore_index) != -100:
        raise ValueError(f"ignore_index={ignore_index} is of the target, which is None: pass target=, or leave it out")
    arguments.required("input", input)
    return input.new_zeros(_all_rows(input.shape[:-1], parts, row_tensors, reduction), dtype=torch.int64), -100


def _all_rows(shape: Sequence[int], parts: int, row_tensors: Any, reduction: Any) -> Sequence[int]:
    if parts == 1 or len(shape) == 0:
        return shape
    for tensor in row_tensors if isinstance(row_tensors, (tuple, list)) else ():
        if isinstance(tensor, Tensor):
            return tensor.shape[: len(shape)]
    if reduction == "none":
        raise ValueError(
            "without a target nothing says along which dimension sequence_parallel=True splits the rows: pass one with "
            'reduction="none"'
        )
    return parts * shape[0], *shape[1:]  # a sum does not depend on the order


def spec(
    ignore_index: Any,
    softcap: Any,
    logit_scale: Any,
    num_classes: Any,
    beta: Any,
    temperature: Any,
    teacher_softcap: Any,
    teacher_logit_scale: Any,
) -> Divergences:
    """The options in the types that kernels take."""
    options = arguments.loss_options(ignore_index, 0.0, softcap, logit_scale).row_options
    return Divergences(
        options,
        None if num_classes is None else arguments.integer("num_classes", num_classes),
        arguments.number("beta", beta),
        arguments.number("temperature", temperature),
        None if teacher_softcap is None else arguments.number("teacher_softcap", teacher_softcap),
        arguments.number("teacher_logit_scale", teacher_logit_scale),
    )


def fixed_loss(spec: Divergences, hard_weight: Any) -> FixedLoss:
    """The generalised Jensen-Shannon divergence of the spec's beta, and a cross entropy on the target."""
    hard_weight = arguments.number("hard_weight", hard_weight)
    distillation_checks.hard_weight(hard_weight)
    name = "kl" if spec.beta == 0.0 else "reverse_kl" if spec.beta == 1.0 else "mixture"
    return FixedLoss(spec._replace(fields=name if hard_weight == 0.0 else f"{name},log_prob"), hard_weight)
