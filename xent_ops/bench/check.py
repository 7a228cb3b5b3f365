"""Compares a loss and its gradient with float64, a few rows at a time: xent_ops.testing has the reference.

Each row has its own relative error. A mean over 8192 rows makes every off-target gradient smaller than any absolute
tolerance, and one wrong row in 8192 does not show in the norm of the whole gradient. The budgets of xent_ops.testing
are for kernels that compute in float32; peers may round to the logits' dtype in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..testing.rows import Expected, oracle

IGNORE_INDEX = -100
# Arguments of xent_ops.cross_entropy beside logits and target. ``weight=True`` stands for the problem's class weights.
Options = Mapping[str, Any]
# Logits held in float64 at a time, in two dozen copies of 16 MiB; on a GPU of 128 MiB, because a chunk of few rows
# would be slow there: each chunk of a head reads and writes all of the weight's gradient.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 24}


# The relative errors of a result and their limits, by name. An error is inf if a value is not finite, or not zero as
# required.
Errors = dict[str, tuple[float, float]]


def wrong(errors: Errors) -> str:
    """Names the errors above their limits."""
    return ", ".join(
        f"relative error of {name} {error:.1e}, tolerance {limit:.1e}"
        for name, (error, limit) in errors.items()
        if not error <= limit
    )


def tolerance(dtype: torch.dtype) -> float:
    """4 roundings to the logits' dtype, as in eager F.cross_entropy; at least the error of float32 exponentials."""
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    return max(4 * torch.finfo(dtype).eps, 64 * torch.finfo(accumulator).eps)


def worst(*errors: Tensor) -> float:
    """The largest error. nan counts as inf, because a comparison with nan is False and max() may drop it."""
    return max(float(error.nan_to_num(nan=math.inf, posinf=math.inf).max()) for error in errors)


def loss_error(actual: Tensor, expected: Tensor) -> float:
    return worst((actual.double() - expected).abs() / expected.abs()) if actual.shape == () else math.inf


def norm_error(actual: Tensor, expected: Tensor) -> float:
    """The relative error in the 2-norm."""
    if actual.shape != expected.shape:
        return math.inf
    return worst((actual - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny))


def chunks(rows: int, classes: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows with at most CHUNK logits each."""
    step = max(1, CHUNK.get(device.type, CHUNK["cpu"]) // classes)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def cross_entropy(
    logits: Tensor, target: Tensor, part: slice, weight: Tensor, options: Options
) -> tuple[Tensor, Expected]:
    """The part of the mean loss that comes from some rows, and the gradient of their logits.

    ``logits`` are of the rows ``part``, and ``target`` is of all rows. ``weight`` is used if the options name it.
    """
    row_options: dict[str, Any] = {**options, "device": logits.device}
    scale = row_options.pop("lse_square_scale", 0.0)
    counted = (target != IGNORE_INDEX).double()
    divisor = counted.sum()
    square_scale = scale * counted[part] / divisor
    if "weight" in options:
        row_options["weight"] = weight
        divisor = (counted * weight.double()[target.clamp(min=0)]).sum()
    expected = oracle(logits, target[part], grad_loss=1 / divisor, **row_options)
    if scale:
        expected = oracle(
            logits, target[part], grad_loss=1 / divisor, grad_lse=2 * square_scale * expected.lse, **row_options
        )
    return expected.loss.sum() / divisor + (square_scale * expected.lse.square()).sum(), expected


def row_errors(actual: Tensor, expected: Expected, target: Tensor) -> Tensor:
    """(rows,): the larger of the relative errors at the target and, in the 2-norm, away from it.

    An error is relative to the terms of the gradient: with label smoothing a gradient is the difference of two terms,
    often nearly zero. Half the distance of subnormal numbers is no error. Ignored rows must be zeros.
    """
    info, counted = torch.finfo(actual.dtype), target != IGNORE_INDEX
    index = torch.where(counted, target, 0).unsqueeze(1)
    error = ((actual - expected.grad).abs() - info.tiny * info.eps / 2).clamp(min=0)
    at_target = (error.gather(1, index) / expected.grad_scale.gather(1, index)).squeeze(1)
    error.scatter_(1, index, 0.0)
    size = expected.grad_scale.scatter(1, index, 0.0).norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    zero = (actual == 0).all(dim=1)
    return torch.where(counted, torch.maximum(at_target, error.norm(dim=1) / size), torch.where(zero, 0.0, math.inf))
