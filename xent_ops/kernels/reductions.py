"""From losses of rows to a reduced loss, in plain torch: what a mean divides by, and the z-loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .options import DEFAULTS, Options
from .reference import accumulator, cross_entropy_forward, gather_target, weights_at


def target_weights(
    target: Tensor, weight: Tensor | None, classes: int, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """(...): the class weight of each row's target, 1 without class weights; 0 in ignored rows."""
    index, counted, invalid = gather_target(target, classes, ignore_index)
    if weight is None:
        return counted.to(dtype)
    return torch.where(counted & ~invalid, weights_at(weight.to(dtype), index), 0.0)


def divisor_of(target_weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """(2,): the sum of the counted targets' class weights, and the number of counted rows."""
    number = (target.to(torch.int64) != ignore_index).sum()
    return torch.stack([target_weight.sum(), number.to(target_weight.dtype)])


def z_losses(lse: Tensor, target: Tensor, ignore_index: int, lse_square_scale: float) -> Tensor:
    """(...): of each row, 0 in ignored ones."""
    # Masked before the square: a row of padding may hold anything, and the gradient of inf^2 * 0 is NaN.
    counted = target.to(torch.int64) != ignore_index
    return lse_square_scale * torch.where(counted, lse, 0.0).square()


class Reduced(NamedTuple):
    value: Tensor  # includes the z-loss
    z_loss: Tensor | None  # None where lse_square_scale is 0
    divisor: Tensor | None  # (2,), with "mean"


def reduce_rows(
    loss: Tensor,
    lse: Tensor,
    target: Tensor,
    target_weight: Tensor,  # see target_weights; read with "mean" alone
    *,
    ignore_index: int,
    lse_square_scale: float,
    reduction: str,
) -> Reduced:
    """Losses of class-index rows, (...), to () or, with reduction="none", to themselves and the z-loss.

    "mean" divides the loss by the sum of the targets' class weights, as torch does (NaN where no row is counted),
    and the z-loss ``lse_square_scale * lse^2`` by the number of counted rows, as Liger-Kernel and flash-attn do.
    """
    z_loss = None if lse_square_scale == 0.0 else z_losses(lse, target, ignore_index, lse_square_scale)
    divisor = None
    if reduction != "none":
        loss = loss.sum()
        z_loss = None if z_loss is None else z_loss.sum()
    if reduction == "mean":
        divisor = divisor_of(target_weight, target, ignore_index)
        loss = loss / divisor[0]
        z_loss = None if z_loss is None else z_loss / divisor[1]
    return Reduced(loss if z_loss is None else loss + z_loss, z_loss, divisor)


def cross_entropy_divisor(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, options: Options = DEFAULTS
) -> tuple[Tensor, Tensor]:
    """(divisor, 1 / divisor), each (2,)."""
    weights = target_weights(target, weight, logits.shape[-1], options.ignore_index, accumulator(logits))
    divisor = divisor_of(weights, target, options.ignore_index)
    return divisor, divisor.reciprocal()


def cross_entropy_reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor, Tensor]:
    """(value, divisor, lse): (), (2,), (...). The divisor does not depend on the reduction; a sum is not divided."""
    loss, lse = cross_entropy_forward(logits, target, weight, options=options)
    weights = target_weights(target, weight, logits.shape[-1], options.ignore_index, loss.dtype)
    value, _, divisor = reduce_rows(
        loss,
        lse,
        target,
        weights,
        ignore_index=options.ignore_index,
        lse_square_scale=lse_square_scale,
        reduction=reduction,
    )
    return value, divisor_of(weights, target, options.ignore_index) if divisor is None else divisor, lse
