"""float16 cannot hold a gradient that was divided by the number of rows, or multiplied by a large weight.

With 32768 rows and 128256 classes almost all of it would be zero. So the gradient of float16 logits is computed for
upstream gradients whose largest magnitude is one. The factors that this took out multiply the products later, whose
sums over chunks are float32. There are two kinds:

- a divisor for all rows of a reduced loss, whose gradients are computed with the loss (``split_divisors``);
- a factor for each row where upstream gradients are known (``split_grads``, ``RowFactors``). Then the bits of a row of
  the input's gradient do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import reductions, reference
from ..kernels.options import LossOptions, RowOptions

DEFAULT_LOSS = LossOptions()


def divisible(number: Tensor) -> Tensor:
    """The number, or one if nothing can be divided by it."""
    return torch.where((number != 0.0) & number.isfinite(), number, 1.0)


def split_divisors(
    dtype: torch.dtype,
    divisors: Tensor,
    target: Tensor,
    token_weight: Tensor | None = None,
    weight: Tensor | None = None,
    classes: int = 1,
    loss: LossOptions = DEFAULT_LOSS,
) -> tuple[Tensor, Tensor | None]:
    """(divisors of the gradients of a chunk's logits, (2,); divisor of their products, ()).

    For a reduced loss and its z-loss, with these weights of rows. Without ``weight`` all class weights count as
    their mean, the quotient of the two divisors, because a rank does not have the class weights of all targets.
    """
    if dtype != torch.float16:
        return divisors, None
    target, options = target.reshape(-1), loss.row_options
    factors = divisors.reciprocal().unsqueeze(-1).expand(2, target.shape[0])
    if token_weight is not None:
        factors = factors * reductions.counted_weights(
            token_weight.reshape(-1), target, options.ignore_index, divisors.dtype
        )
    square_factors = factors[1] * loss.lse_square_scale if loss.lse_square_scale != 0.0 else None
    loss_factors = factors[1] if weight is None else factors[0]
    factor = largest(magnitudes(target, weight, None, classes, options, loss_factors, square_factors))
    return divisors * factor, factor.reciprocal()


def largest(numbers: Tensor) -> Tensor:
    """A divisor () for these numbers, so that none is above one."""
    return divisible(torch.cat([numbers.new_zeros(1), numbers]).amax())


def magnitudes(
    target: Tensor,
    weight: Tensor | None,
    lse_coefficient: Tensor | None,
    classes: int,
    options: RowOptions,
    grad_loss: Any,
    *grads: Tensor | None,
) -> Tensor:
    """For each row, (n,), the largest magnitude of its upstream gradients, with its class weights.

    For a slice of the classes, lse_coefficient replaces the weights. If no weight is negative, it is at least the
    factor of any column.
    """
    counted = reference.is_counted(target, options.ignore_index)
    loss_grads = torch.where(counted, grad_loss, 0.0)
    if lse_coefficient is not None:
        loss_grads = loss_grads * lse_coefficient
    elif weight is not None:
        target_weights = reductions.target_weights(target, weight, classes, options.ignore_index, grad_loss.dtype)
        if options.label_smoothing > 0.0:
            target_weights = target_weights.abs() + weight.to(grad_loss.dtype).abs().mean()
        loss_grads = loss_grads * target_weights
    rows = [loss_grads, *(grad for grad in grads if grad is not None)]
    return torch.stack(rows).abs().amax(0)


class RowFactors(NamedTuple):
    """What ``split_grads`` took out of the upstream gradients of rows."""

    rows: Tensor  # (n,)
    largest: Tensor  # ()
    shares: Tensor  # (n,): factors of rows over the largest one


def times(rows: Tensor, factors: Tensor | None) -> Tensor:
    """Rows (n, H) times their factors (n,), in the dtype of the rows."""
    return rows if factors is None else rows * factors.to(rows.dtype).unsqueeze(1)


def split_grads(
    dtype: torch.dtype,
    grads: Sequence[Tensor | None],
    target: Tensor,
    classes: int,
    options: RowOptions,
    weight: Tensor | None = None,
    lse_coefficient: Tensor | None = None,
) -> tuple[RowFactors | None, Sequence[Tensor | None]]:
    """(factors, upstream gradients divided by them). Only float16 has factors, of which each is a power of two.

    The first gradient is the losses'.
    """
    if dtype != torch.float16:
        return None, grads
    row_grads = [grad if grad is None or grad.dim() == 1 else grad.abs().amax(-1) for grad in grads]
    numbers = magnitudes(target, weight, lse_coefficient, classes, options, *row_grads)
    powers = divisible(torch.pow(2.0, numbers.log2().ceil().clamp(max=127)))
    divisor = largest(torch.where(numbers == 0.0, 0.0, powers))
    rows = torch.where(numbers == 0.0, divisor, powers)  # negative class weights may add up to 0 beside a gradient
    divided = [None if grad is None else grad / rows.view(-1, *(1,) * (grad.dim() - 1)) for grad in grads]
    return RowFactors(rows, divisor, rows / divisor), divided
