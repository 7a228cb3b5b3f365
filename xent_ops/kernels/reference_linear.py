"""Linear cross entropy in plain torch, with all logits at once. Second derivatives are computed from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import reference
from .options import DEFAULTS, RowOptions


def linear_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisors: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    lse_coefficient: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    lse_low: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    **keywords: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, linear_weight and linear_bias; (0,) where the mask is False.

    ``keywords``: as for ``reference.cross_entropy_backward``.
    """
    logits = input @ linear_weight.t()  # torch 2.11 cannot trace F.linear with a bias under torch.func.vjp
    if linear_bias is not None:
        logits = logits + linear_bias
    rows = (grad_loss, grad_lse, logits, target, lse, weight, divisors, grad_entropy, entropy, lse_coefficient)
    grad = reference.cross_entropy_backward(*rows, lse_low=lse_low, options=options, **keywords)
    rows_first = grad.reshape(-1, grad.shape[-1])
    return (
        grad @ linear_weight if output_mask[0] else input.new_empty(0),
        rows_first.t() @ input.reshape(rows_first.shape[0], input.shape[-1]) if output_mask[1] else input.new_empty(0),
        rows_first.sum(0) if output_mask[2] else input.new_empty(0),
    )
