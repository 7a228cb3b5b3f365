"""Loss and gradient of a row in one call, and the factor that its gradient lacks: in plain torch, by reference.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .options import DEFAULTS, RowOptions
from .reference import cross_entropy_backward, grad_lse_of_square, statistics


def cross_entropy_with_grad(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None = None,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    grad_dtype: torch.dtype | None = None,
    *,
    options: RowOptions = DEFAULTS,
    forward: Callable[..., tuple[Tensor, ...]] = statistics,
    backward: Callable[..., Tensor | None] = cross_entropy_backward,
) -> tuple[Tensor, ...]:
    """(loss, lse, argmax, entropy, gradient of grad_scale * loss + grad_lse_square * lse^2 summed over counted rows).

    An ignored row has an infinite lse, as in ``cross_entropy_reduced``, argmax -1 and entropy 0. A ``backward`` that
    writes the gradient elsewhere returns None; then it is no result.
    """
    flags = (with_argmax, with_entropy, False, True)
    *outputs, lse_low = forward(logits, target, weight, *flags, options=options)
    lse = outputs[1]
    grad_lse = grad_lse_of_square(grad_lse_square, lse, target, options.ignore_index)
    backward_args = (grad_scale, grad_lse, logits, target, lse, weight)
    gradient = backward(*backward_args, lse_low=lse_low, grad_dtype=grad_dtype, options=options)
    return tuple(outputs) if gradient is None else (*outputs, gradient)


def scaled_grad(grad: Tensor, factor: Tensor) -> Tensor:
    """``scale_grad_``, out of place."""
    factor = factor.unsqueeze(-1)
    return torch.where(factor == 0, 0.0, grad * factor).to(grad.dtype)


def scale_grad_(grad: Tensor, factor: Tensor) -> None:
    """grad (..., V) times factor, () or (...). A factor of 0 gives zeros, for any values in the row."""
    if factor.device.type == "cpu" and bool((factor == 1).all()):
        return
    factor = factor.unsqueeze(-1)  # at least one dimension: torch would round a scalar to the gradient's dtype
    grad.mul_(factor).masked_fill_(factor == 0, 0.0)
