"""The loss of class probabilities in plain torch. See reference.py. With q = (1-e) p + e/V:

loss     = sum_j w_j q_j (lse - x_j)
grad_x_j = (a sum_k w_k q_k + b) softmax_j - a w_j q_j
"""

from __future__ import annotations

import torch
from torch import Tensor

from .options import DEFAULTS, RowOptions
from .reference import _finish, _logsumexp, activation, softmax_gradient


def weighted_probabilities(
    probabilities: Tensor, weight: Tensor | None, label_smoothing: float, dtype: torch.dtype
) -> Tensor:
    """w_j q_j with q = (1-e) p + e/V: the factor of lse - x_j in the loss of class probabilities p."""
    q = probabilities.to(dtype)
    if label_smoothing > 0.0:
        q = q * (1 - label_smoothing) + label_smoothing / probabilities.shape[-1]
    return q if weight is None else q * weight.to(dtype)


def soft_cross_entropy_forward(
    logits: Tensor,
    probabilities: Tensor,
    weight: Tensor | None = None,
    check_target: bool = True,  # ops/soft_cross_entropy.py checks the targets
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, Tensor]:
    """(loss, lse), each (...): loss = sum_j w_j q_j (lse - x_j)."""
    x = activation(logits, options)
    maximum, log_sum = _logsumexp(x)
    q = weighted_probabilities(probabilities, weight, options.label_smoothing, x.dtype)
    return (q * (maximum - x + log_sum)).sum(-1), (maximum + log_sum).squeeze(-1)


def soft_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    probabilities: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> Tensor:
    """grad_logits (..., V): ``(a sum(w q) + b) softmax_j - a w_j q_j`` through the activation."""
    x = activation(logits, options)
    q = weighted_probabilities(probabilities, weight, options.label_smoothing, x.dtype)
    a = grad_loss.to(x.dtype)
    mass = q.sum(-1)
    is_skipped = (a == 0) & ~mass.isfinite()  # as in _finish, even if the probabilities are not finite
    q = torch.where(is_skipped.unsqueeze(-1), 0.0, q)
    total = a * torch.where(is_skipped, 0.0, mass)
    if grad_lse is not None:
        total = total + grad_lse.to(x.dtype)
    grad = softmax_gradient(x, lse, total) - a.unsqueeze(-1) * q
    return _finish(grad, x, lse, total.abs() + a.abs(), logits.dtype, options)


def soft_target_gradients(
    grad_loss: Tensor,
    logits: Tensor,
    probabilities: Tensor,
    lse: Tensor,
    weight: Tensor | None,
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of sum_j w_j q_j (lse - x_j) for class probabilities (..., V) and their weights (V,)."""
    x = activation(logits, options)
    grad_q = grad_loss.to(x.dtype).unsqueeze(-1) * (lse.unsqueeze(-1) - x)
    grad_target = grad_q * (1 - options.label_smoothing)
    if weight is None:
        return grad_target.to(probabilities.dtype), None
    q = weighted_probabilities(probabilities, None, options.label_smoothing, x.dtype)
    # Not flatten(0, -2): autograd's vmap (is_grads_batched) has no rule for it.
    grad_weight = (grad_q * q).sum(tuple(range(logits.dim() - 1))) if logits.dim() > 1 else grad_q * q
    return (grad_target * weight.to(x.dtype)).to(probabilities.dtype), grad_weight.to(weight.dtype)
