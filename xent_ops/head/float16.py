"""float16 has no numbers for a gradient that was divided by the number of rows.

With 32768 rows and 128256 classes almost all of it is zero. So the gradient of float16 logits is made for upstream
gradients of about one, and the rest of the factor is applied to the products, whose sums over chunks are float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reductions, reference
from ..kernels.options import Options


def divisible(number: Tensor) -> Tensor:
    """The number, or one where nothing can be divided by it."""
    return torch.where((number != 0.0) & number.isfinite(), number, 1.0)


def divisor_after_products(divided_by: Tensor) -> Tensor:
    """(): what float16 gradients are divided by after the products: the number of counted rows, or the divisor.

    Not the sum of their class weights, which may be far from one. Zero and infinity are divided by at once.
    """
    return divisible(divided_by[1])


def split_divisors(dtype: torch.dtype, divided_by: Tensor) -> tuple[Tensor, Tensor | None]:
    """(what the gradients of a chunk's logits are divided by, (2,), and what their products are, ())."""
    if dtype != torch.float16:
        return divided_by, None
    later = divisor_after_products(divided_by)
    return divided_by / later, later


def largest(
    target: Tensor,
    weight: Tensor | None,
    coefficient: Tensor | None,
    classes: int,
    options: Options,
    grad_loss: Any,
    *grads: Tensor | None,
) -> Tensor:
    """What to divide upstream gradients of rows by, (), so that none is above one, with its class weights.

    Of a slice of the classes the coefficient stands for the weights: where these are not negative, it is at least what
    any column is multiplied by.
    """
    counted = reference.is_counted(target, options.ignore_index)
    masses = torch.where(counted, grad_loss, 0.0)
    if coefficient is not None:
        masses = masses * coefficient
    elif weight is not None:
        of_targets = reductions.target_weights(target, weight, classes, options.ignore_index, grad_loss.dtype)
        if options.label_smoothing > 0.0:
            of_targets = of_targets.abs() + weight.to(grad_loss.dtype).abs().mean()
        masses = masses * of_targets
    rows = [masses, *(grad for grad in grads if grad is not None)]
    return divisible(torch.cat([grad_loss.new_zeros(1), *rows]).abs().amax())
