"""Reduces losses of rows in plain torch: the divisors of a mean, and the z-loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .options import DEFAULTS, LossOptions, RowOptions
from .reference import (
    accumulator,
    gather_target,
    is_counted,
    statistics,
    weights_at,
)


def target_weights(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """(...): the class weight of each row's target, 1 without class weights; 0 in ignored rows."""
    index, counted, invalid = gather_target(target, 1 if weight is None else weight.shape[0], ignore_index)
    if weight is None:
        return counted.to(dtype)
    return torch.where(counted & ~invalid, weights_at(weight.to(dtype), index), 0.0)


def counted_weights(token_weight: Tensor, target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """(...): the token weights, 0 in ignored rows."""
    return torch.where(is_counted(target, ignore_index), token_weight.to(dtype), 0.0)


def divisor_of(target_weight: Tensor, target: Tensor, ignore_index: int, token_weight: Tensor | None = None) -> Tensor:
    """(2,): the sum of the counted targets' class weights, and the number of counted rows; each times token_weight."""
    dtype = target_weight.dtype
    if token_weight is not None:
        token_weights = counted_weights(token_weight, target, ignore_index, dtype)
        return torch.stack([(target_weight * token_weights).sum(), token_weights.sum()])
    return torch.stack([target_weight.sum(), is_counted(target, ignore_index).sum().to(dtype)])


def weights_of_mean(token_weight: Tensor, divisor: Tensor) -> Tensor:
    """The token weights, all NaN for a divisor of 0. The mean is NaN then, and so must be its gradients: ``times``
    would mask them, since the rows' weights are 0.
    """
    if not token_weight.is_floating_point():
        token_weight = token_weight.to(divisor.dtype)
    return torch.where(divisor == 0.0, float("nan"), token_weight)


def times(values: Tensor, factors: Tensor | None) -> Tensor:
    """The values of rows times their ``counted_weights``; 0 where the weight is 0, even if the value is NaN."""
    return values if factors is None else torch.where(factors == 0.0, 0.0, values * factors)


class Reduced(NamedTuple):
    value: Tensor  # includes the z-loss
    z_loss: Tensor | None  # None if lse_square_scale is 0


def reduce_rows(
    row_loss: Tensor,
    lse: Tensor,
    target: Tensor,
    divisors: Tensor | None,
    loss: LossOptions,
    token_weight: Tensor | None = None,
) -> Reduced:
    """Losses of class-index rows, (...), to () or, with reduction="none", to themselves and the z-loss.

    "mean" divides the loss by the sum of the targets' class weights, as torch does (NaN if no row is counted). It
    divides the z-loss ``lse_square_scale * lse^2`` by the number of counted rows, as Liger-Kernel and flash-attn do.
    These two are ``divisors``; no other reduction reads them. Loss and z-loss are multiplied by token_weight first.
    """
    ignore_index, factors = loss.row_options.ignore_index, None
    if token_weight is not None:
        if loss.reduction == "mean":
            assert divisors is not None
            token_weight = weights_of_mean(token_weight, divisors[0])
        factors = counted_weights(token_weight, target, ignore_index, row_loss.dtype)
    row_loss, z_loss = times(row_loss, factors), None
    if loss.lse_square_scale != 0.0:
        # Masked before the square: a padding row may hold any value, and the gradient of inf^2 * 0 is NaN.
        squares = torch.where(is_counted(target, ignore_index), lse, 0.0).square()
        z_loss = times(loss.lse_square_scale * squares, factors)
    if loss.reduction != "none":
        row_loss = row_loss.sum()
        z_loss = None if z_loss is None else z_loss.sum()
    if loss.reduction == "mean":
        assert divisors is not None
        row_loss = row_loss / divisors[0]
        z_loss = None if z_loss is None else z_loss / divisors[1]
    return Reduced(row_loss if z_loss is None else row_loss + z_loss, z_loss)


def divisors_of(
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    divisor: Tensor | None,
    loss: LossOptions,
    dtype: torch.dtype,
) -> Tensor:
    """(2,): what a mean or a sum and its z-loss are divided by. A sum is divided by ``divisor``, or by one."""
    if loss.reduction == "mean":
        ignore_index = loss.row_options.ignore_index
        return divisor_of(target_weights(target, weight, ignore_index, dtype), target, ignore_index, token_weight)
    if divisor is None:
        return target.new_ones(2, dtype=dtype)
    return divisor.to(dtype).expand(2).contiguous()


def row_factors(
    divisors: Tensor, target: Tensor, token_weight: Tensor | None, loss: LossOptions
) -> tuple[Tensor, Tensor | None]:
    """Factors of the gradients of losses and of lse^2, () or with token weights (...). None: there is no z-loss."""
    factors = divisors.reciprocal()
    if token_weight is not None:
        weights = counted_weights(token_weight, target, loss.row_options.ignore_index, divisors.dtype)
        factors = factors.view(2, *[1] * weights.dim()) * weights
    return factors[0], None if loss.lse_square_scale == 0.0 else loss.lse_square_scale * factors[1]


def row_divisors(
    target: Tensor,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    divisor: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(divisors, factors of the gradients of losses, of lse^2). The last is (0,) without a z-loss."""
    loss = LossOptions(options, lse_square_scale, reduction)
    divisors = divisors_of(target, weight, token_weight, divisor, loss, dtype or torch.float32)
    scale, square = row_factors(divisors, target, token_weight, loss)
    return divisors, scale, divisors.new_empty(0) if square is None else square


def row_summary(
    loss: Tensor,
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    divisors: Tensor | None = None,
    argmax: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(value, divisors, z-loss, share of counted rows that argmax hits). Losses of ignored rows do not count.

    The divisors are those of a mean, or (0,) if they are given. Without argmax the last two are (0,).
    """
    loss_options, loss = LossOptions(options, lse_square_scale, reduction), loss.to(accumulator(loss))
    lse, made = lse.to(loss.dtype), loss.new_empty(0)
    loss = torch.where(is_counted(target, options.ignore_index), loss, 0.0)
    if divisors is None:
        mean = loss_options._replace(reduction="mean")
        divisors = made = divisors_of(target, weight, token_weight, None, mean, loss.dtype)
    value, z_loss = reduce_rows(loss, lse, target, divisors.to(loss.dtype), loss_options, token_weight)
    if argmax is None:
        return value, made, loss.new_empty(0), loss.new_empty(0)
    z_loss = torch.zeros_like(value) if z_loss is None else z_loss
    return value, made, z_loss, share_of_hits(argmax, target, options.ignore_index, loss.dtype)


def share_of_hits(argmax: Tensor, target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """(): the share of counted rows that argmax hits, NaN without such a row."""
    counted = is_counted(target, ignore_index)
    hits = counted & (argmax == target)
    return hits.sum() / counted.sum().to(dtype)  # a division of integers would have the default dtype


def cross_entropy_reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    forward: Callable[..., tuple[Tensor, ...]] = statistics,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(value, divisors, lse, lse_low): (), (2,), (...), (...).

    The divisors do not depend on the reduction; a sum is not divided. The lse and lse_low are for the backward. In
    ignored rows they are infinite and 0, so that the softmax is zero: other kernels do not read these rows.
    ``forward`` computes the losses of the rows.
    """
    row_loss, lse, _, _, lse_low = forward(logits, target, weight, False, False, False, True, options=options)
    keywords: dict[str, Any] = {"lse_square_scale": lse_square_scale, "reduction": reduction}
    value, divisors, *_ = row_summary(row_loss, lse, target, weight, options=options, **keywords)
    return value, divisors, lse, lse_low
