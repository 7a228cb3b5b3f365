"""``torch.ops.xent.cross_entropy``: the row operator, then reductions in plain torch on vectors of N elements.

Composite (CompositeImplicitAutograd): autograd and every tracer see its parts, torch.export sees one node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import reference
from . import checks, transforms
from .library import LIBRARY, define


class Reduced(NamedTuple):
    loss: Tensor  # includes the z-loss
    z_loss: Tensor | None  # None where lse_square_scale is 0


class Counts(NamedTuple):
    """What the reductions divide by; None where nothing asks for it."""

    counted: Tensor | None  # (...) bool: rows that are not ignored, for the z-loss
    number: Tensor | None  # () of counted rows, for "mean"
    weights: Tensor | None  # () sum of their targets' class weights, for "mean"


def count_rows(
    target: Tensor,
    weight: Tensor | None,
    *,
    ignore_index: int,
    lse_square_scale: float,
    reduction: str,
    classes: int,
    dtype: torch.dtype,
) -> Counts:
    if reduction != "mean" and lse_square_scale == 0.0:
        return Counts(None, None, None)
    counted = target.to(torch.int64) != ignore_index
    if reduction != "mean":
        return Counts(counted, None, None)
    number = counted.sum()
    if weight is None:
        return Counts(counted, number, number)
    index, _, invalid = reference.gather_target(target, classes, ignore_index)
    weights = torch.where(counted & ~invalid, reference.weights_at(weight.to(dtype), index), 0.0).sum()
    return Counts(counted, number, weights)


def z_losses(lse: Tensor, counted: Tensor, lse_square_scale: float) -> Tensor:
    """Of each row, 0 in ignored ones."""
    # Masked before the square: a row of padding may hold anything, and the gradient of inf^2 * 0 is NaN.
    return lse_square_scale * torch.where(counted, lse, 0.0).square()


def reduce_rows(loss: Tensor, lse: Tensor, counts: Counts, *, lse_square_scale: float, reduction: str) -> Reduced:
    """Row losses to the loss of class-index targets.

    "mean" divides the loss by the sum of the targets' class weights, as torch does (NaN where no row is counted),
    and the z-loss ``lse_square_scale * lse^2`` by the number of counted rows, as Liger-Kernel and flash-attn do.
    """
    z_loss = None
    if lse_square_scale != 0.0:
        assert counts.counted is not None
        z_loss = z_losses(lse, counts.counted, lse_square_scale)
    if reduction != "none":
        loss = loss.sum()
        z_loss = None if z_loss is None else z_loss.sum()
    if reduction == "mean":
        assert counts.weights is not None and counts.number is not None
        loss = loss / counts.weights
        z_loss = None if z_loss is None else z_loss / counts.number
    return Reduced(loss if z_loss is None else loss + z_loss, z_loss)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    checks.arguments(
        logits,
        target,
        weight,
        ignore_index,
        label_smoothing,
        lse_square_scale,
        softcap,
        logit_scale,
        reduction,
        input_name="logits",
    )
    checks.weight_without_grad(weight)
    if transforms.forward_mode():  # in which operators drop the tangents
        transforms.refuse("torch.ops.xent.cross_entropy")
    loss, lse = torch.ops.xent.cross_entropy_forward(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
    )
    counts = count_rows(
        target,
        weight,
        ignore_index=ignore_index,
        lse_square_scale=lse_square_scale,
        reduction=reduction,
        classes=logits.shape[-1],
        dtype=loss.dtype,
    )
    return reduce_rows(loss, lse, counts, lse_square_scale=lse_square_scale, reduction=reduction).loss


define("cross_entropy")
LIBRARY.impl("cross_entropy", cross_entropy, "CompositeImplicitAutograd")
