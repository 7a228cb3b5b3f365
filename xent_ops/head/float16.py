"""float16 cannot hold a gradient that was divided by the number of rows, or multiplied by a large weight.

With 32768 rows and 128256 classes almost all of it would be zero. So the gradient of float16 logits is computed for
upstream gradients whose largest magnitude is about one. The factors that this took out multiply the products later,
whose sums over chunks are float32. There are two kinds:

- a factor for all rows of a reduced loss without weights of rows (``split_loss``);
- a factor for each row where the rows have weights, or upstream gradients of their own (``split_loss``,
  ``split_grads``). It is a power of two that multiplies the row of the input's gradient. In the product for the
  weight's gradient the input's row is multiplied by its share of the largest factor. Then a row that weighs little
  keeps its bits in the input's gradient, and they do not depend on the other rows. Its part of the weight's gradient is
  rounded to float16 beside the largest one: a share below 2^-14 loses bits, below 2^-24 it is 0.
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


class Split(NamedTuple):
    """The upstream gradients of a reduced loss for chunks of logits, and the factors that their products lack."""

    divisors: Tensor  # (2,), of the gradients of a chunk's logits
    token_weight: Tensor | None  # their weights, of the target's shape
    divisor: Tensor | None = None  # (): of the products
    rows: Tensor | None = None  # of the target's shape: instead of the divisor, factors of the input's gradient
    shares: Tensor | None = None  # of the target's shape: ``RowFactors.shares``


def split_loss(
    dtype: torch.dtype,
    divisors: Tensor,
    target: Tensor,
    token_weight: Tensor | None = None,
    weight: Tensor | None = None,
    loss: LossOptions = DEFAULT_LOSS,
    row_weight: Tensor | None = None,
) -> Split:
    """For a reduced loss and its z-loss, whose gradients are computed with the loss.

    ``row_weight``, of the target's shape: the class weights of the rows, for a rank that has a slice of ``weight``.
    """
    if dtype != torch.float16:
        return Split(divisors, token_weight)
    rows, options = target.reshape(-1), loss.row_options
    row_weight, flat_weight = (None if one is None else one.reshape(-1) for one in (row_weight, token_weight))
    factors = reductions.row_factors(divisors, rows, flat_weight, loss)
    grads = [None if one is None else one.expand(rows.shape) for one in factors]
    numbers = magnitudes(rows, weight, row_weight, options, *grads)
    if token_weight is None and weight is None and row_weight is None:
        factor = largest(numbers)
        return Split(divisors * factor, None, factor.reciprocal())
    taken = row_factors(numbers)
    inverse = taken.rows.reciprocal().view(target.shape)
    token_weight = inverse if token_weight is None else inverse * token_weight.to(inverse.dtype)
    shares = taken.shares.view(target.shape)
    return Split(divisors, token_weight, taken.largest.reciprocal(), taken.rows.view(target.shape), shares)


def largest(numbers: Tensor) -> Tensor:
    """A divisor () for these numbers, so that none is above one."""
    return divisible(torch.cat([numbers.new_zeros(1), numbers]).amax())


def magnitudes(
    target: Tensor,
    weight: Tensor | None,
    lse_coefficient: Tensor | None,
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
        target_weights = reductions.target_weights(target, weight, options.ignore_index, grad_loss.dtype)
        if options.label_smoothing > 0.0:
            mean = weight.to(grad_loss.dtype).abs().mean()
            target_weights = torch.lerp(target_weights.abs(), mean, options.label_smoothing)
        loss_grads = loss_grads * target_weights
    rows = [loss_grads, *(grad for grad in grads if grad is not None)]
    return torch.stack(rows).abs().amax(0)


class RowFactors(NamedTuple):
    """What is taken out of the upstream gradients of rows."""

    rows: Tensor  # (n,), powers of two
    largest: Tensor  # ()
    shares: Tensor  # (n,): factors of rows over the largest one


def row_factors(numbers: Tensor) -> RowFactors:
    """Factors for rows with these magnitudes, (n,). That of an infinite one is 1."""
    powers = divisible(torch.pow(2.0, divisible(numbers).log2().ceil().clamp(-126, 127)))
    divisor = largest(torch.where(numbers == 0.0, 0.0, powers))
    rows = torch.where(numbers == 0.0, divisor, powers)  # negative class weights may add up to 0 beside a gradient
    return RowFactors(rows, divisor, rows / divisor)


def times(rows: Tensor, factors: Tensor | None) -> Tensor:
    """Rows (n, H) times their factors (n,), in the dtype of the rows."""
    return rows if factors is None else rows * factors.to(rows.dtype).unsqueeze(1)


def split_grads(
    dtype: torch.dtype,
    grads: Sequence[Tensor | None],
    target: Tensor,
    options: RowOptions,
    weight: Tensor | None = None,
    lse_coefficient: Tensor | None = None,
) -> tuple[RowFactors | None, Sequence[Tensor | None]]:
    """(factors, upstream gradients divided by them). Only float16 has factors, of which each is a power of two.

    The gradients are those of the losses, the lse and the entropies.
    """
    if dtype != torch.float16:
        return None, grads
    grad_loss, grad_lse, grad_entropy = grads
    if grad_entropy is not None:
        grad_entropy = torch.where(reference.is_counted(target, options.ignore_index), grad_entropy, 0.0)
    grads = (grad_loss, grad_lse, grad_entropy)
    row_grads = [grad if grad is None or grad.dim() == 1 else grad.abs().amax(-1) for grad in grads]
    taken = row_factors(magnitudes(target, weight, lse_coefficient, options, *row_grads))
    divided = [None if grad is None else grad / taken.rows.view(-1, *(1,) * (grad.dim() - 1)) for grad in grads]
    return taken, divided
