"""The loss in plain torch: the CPU's kernel where C++ is not built, and what Inductor gets for the backward.

Per row, with x = softcap(logit_scale * logits), softcap(z) = cap * tanh(z / cap), V classes, target t, class
weights w (1 where none are given) and label smoothing e:

    lse  = logsumexp_j x_j
    loss = w_t (1-e) (lse - x_t) + (e/V) sum_j w_j (lse - x_j)           0 where t == ignore_index
    grad_x_j = A softmax_j - B [j == t] - C w_j                          see ``row_coefficients``

Sources: F.cross_entropy for weights and smoothing, Gemma 2 for the softcap. Everything is computed in float32
(float64 for float64 logits). Functions take logits (..., V) of any strides, and only those named with a _ at the
end write to one.
The backward functions are differentiable, which is where second derivatives come from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def accumulator(logits: Tensor) -> torch.dtype:
    """The dtype of loss and lse: float64 for float64 logits, float32 for all others."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def activation(logits: Tensor, softcap: float | None, logit_scale: float) -> Tensor:
    x = logits.to(accumulator(logits))
    if logit_scale != 1.0:
        x = x * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _activation_derivative(x: Tensor, softcap: float | None, logit_scale: float) -> Tensor | float:
    return logit_scale if softcap is None else logit_scale * (1 - (x / softcap).square())


def gather_target(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(index safe to gather with, is counted, is counted and out of range), each of the target's shape.

    int64 first: uint8 compared with -100 would wrap around and take class 156 for ignored.
    """
    indices = target.to(torch.int64)
    counted = indices != ignore_index
    inside = (indices >= 0) & (indices < classes)
    return torch.where(counted & inside, indices, 0), counted, counted & ~inside


def weights_at(weight: Tensor, index: Tensor) -> Tensor:
    """``weight[index]``. Python's brackets would read a 0-d index (the target of one unbatched row) into an int, which
    synchronises a GPU and which no graph can hold."""
    return torch.ops.aten.index.Tensor(weight, [index])


def _logsumexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """(max, log of the sum of exp(x - max)), each (..., 1): kept apart, lse - x_t loses no digits to a large max."""
    maximum = x.amax(-1, keepdim=True)
    maximum = torch.where(maximum == float("-inf"), 0.0, maximum)
    return maximum, (x - maximum).exp().sum(-1, keepdim=True).log()


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(loss, lse), each (...). A target out of range gives NaN."""
    classes = logits.shape[-1]
    index, counted, invalid = gather_target(target, classes, ignore_index)
    x = activation(logits, softcap, logit_scale)
    maximum, log_sum = _logsumexp(x)
    loss = (maximum - x.gather(-1, index.unsqueeze(-1)) + log_sum).squeeze(-1)
    if weight is not None:
        weight = weight.to(x.dtype)
        loss = loss * weights_at(weight, index)
    if label_smoothing > 0.0:
        terms = maximum - x + log_sum
        smooth = (terms if weight is None else terms * weight).sum(-1)
        loss = (1 - label_smoothing) * loss + label_smoothing / classes * smooth
    loss = torch.where(counted, loss, 0.0).masked_fill(invalid, float("nan"))
    return loss, (maximum + log_sum).squeeze(-1)


def cross_entropy_forward_argmax(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, argmax): argmax is int64, the first index on ties."""
    scaled = activation(logits, None, options.get("logit_scale", 1.0))
    return (*cross_entropy_forward(logits, target, weight, **options), scaled.argmax(-1))


def cross_entropy_forward_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, entropy): entropy = -sum_j softmax_j log softmax_j, where a class of probability 0 adds 0."""
    loss, lse = cross_entropy_forward(logits, target, weight, **options)
    x = activation(logits, options.get("softcap"), options.get("logit_scale", 1.0))
    maximum, log_sum = _logsumexp(x)
    log_p = x - maximum - log_sum  # not x - lse, which has been rounded
    p = log_p.exp()
    return loss, lse, -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)


def row_coefficients(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    classes: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """A, B, C of ``grad_x_j = A softmax_j - B [j == t] - C w_j``, each (...).

    With a = grad_loss and b = grad_lse: B = a w_t (1-e), C = a e/V, A = B + C sum(w) + b. An ignored row has
    a = w_t = 0 (the weight of an ignored class may be infinite), one whose target is out of range a = NaN.
    """
    index, counted, invalid = gather_target(target, classes, ignore_index)
    a = torch.where(counted, grad_loss.to(dtype), 0.0).masked_fill(invalid, float("nan"))
    b = a * (1 - label_smoothing)
    if weight is not None:
        b = b * torch.where(counted, weights_at(weight.to(dtype), index), 0.0)
    c = a * (label_smoothing / classes)
    total = b
    if label_smoothing > 0.0:
        total = total + c * (classes if weight is None else weight.to(dtype).sum())
    if grad_lse is not None:
        total = total + grad_lse.to(dtype)
    return total, b, c


def _softmax_gradient(
    x: Tensor, lse: Tensor, total: Tensor, entropy: Tensor | None = None, grad_entropy: Tensor | None = None
) -> Tensor:
    """``A softmax_j``, and what flows back from the entropy H: ``-grad_entropy softmax_j (log softmax_j + H)``."""
    log_p = x - lse.unsqueeze(-1)
    p = log_p.exp()
    grad = total.unsqueeze(-1) * p
    if grad_entropy is not None and entropy is not None:
        # log 0 goes before it is multiplied: the outer where alone would leave 0 * inf in second derivatives.
        term = p * (torch.where(p == 0, 0.0, log_p) + entropy.unsqueeze(-1))
        grad = grad - grad_entropy.to(x.dtype).unsqueeze(-1) * torch.where(p == 0, 0.0, term)
    return grad


def _finish(
    grad: Tensor, x: Tensor, lse: Tensor, upstream: Tensor, logits: Tensor, softcap: float | None, logit_scale: float
) -> Tensor:
    """Through the activation and into the logits' dtype, contiguous whatever the logits' strides.

    A row that passes nothing back gets exact zeros even where its logits are not finite (0 * NaN is NaN): such
    rows are padding that was never written.
    """
    grad = grad * _activation_derivative(x, softcap, logit_scale)
    dead = (upstream == 0) & ~lse.isfinite()
    return torch.where(dead.unsqueeze(-1), 0.0, grad).to(logits.dtype).contiguous()


def divided(grad_loss: Tensor, divisor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """grad_loss / divisor in the accumulator's dtype; their own may not hold the one, or not resolve the other."""
    return grad_loss if divisor is None else grad_loss.to(dtype) / divisor.to(dtype)


def grad_lse_of_square(grad_lse_square: Tensor | None, lse: Tensor, target: Tensor, ignore_index: int) -> Tensor | None:
    """The gradient of grad_lse_square * lse^2, summed over counted rows."""
    if grad_lse_square is None:
        return None
    counted = target.to(torch.int64) != ignore_index
    return torch.where(counted, 2 * grad_lse_square.to(lse.dtype) * lse, 0.0)


def cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """grad_logits (..., V) in the logits' dtype. Pointwise but for sum(weight): Inductor makes one kernel of it."""
    classes = logits.shape[-1]
    x = activation(logits, softcap, logit_scale)
    total, b, c = row_coefficients(
        divided(grad_loss, divisor, x.dtype),
        grad_lse,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        classes=classes,
        dtype=x.dtype,
    )
    grad = _softmax_gradient(x, lse, total, entropy, grad_entropy)
    column = torch.arange(classes, device=logits.device)
    grad = grad - torch.where(column == target.to(torch.int64).unsqueeze(-1), b.unsqueeze(-1), 0.0)
    if label_smoothing > 0.0:
        grad = grad - (c.unsqueeze(-1) if weight is None else c.unsqueeze(-1) * weight.to(x.dtype))
    upstream = total.abs() + b.abs() + c.abs()
    if grad_entropy is not None:
        upstream = upstream + grad_entropy.to(x.dtype).abs()
    return _finish(grad, x, lse, upstream, logits, softcap, logit_scale)


def cross_entropy_backward_(
    grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any, **options: Any
) -> None:
    """The gradient written over the logits."""
    logits.copy_(cross_entropy_backward(grad_loss, grad_lse, logits, *rest, **options))


def cross_entropy_with_grad(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, gradient of grad_scale * loss + grad_lse_square * lse^2 summed over counted rows)."""
    options["ignore_index"] = ignore_index
    loss, lse = cross_entropy_forward(logits, target, weight, **options)
    grad_lse = grad_lse_of_square(grad_lse_square, lse, target, ignore_index)
    grad_loss = grad_scale.expand(lse.shape)
    return loss, lse, cross_entropy_backward(grad_loss, grad_lse, logits, target, lse, weight, **options)


def cross_entropy_with_grad_(logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """(loss, lse), and the gradient written over the logits."""
    loss, lse, grad = cross_entropy_with_grad(logits, *args, **options)
    logits.copy_(grad)
    return loss, lse


def scale_grad_(grad: Tensor, factor: Tensor) -> None:
    """grad (..., V) times factor, () or (...). Zero times anything is zero, as in a row that passes nothing back."""
    if factor.device.type == "cpu" and bool((factor == 1).all()):
        return
    factor = factor.unsqueeze(-1)  # of one dimension at least: torch would round a scalar to the gradient's dtype
    grad.mul_(factor).masked_fill_(factor == 0, 0.0)


def cross_entropy_backward_entropy(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return cross_entropy_backward(
        grad_loss, grad_lse, logits, target, lse, weight, grad_entropy=grad_entropy, entropy=entropy, **options
    )


def weighted_probabilities(target: Tensor, weight: Tensor | None, label_smoothing: float, dtype: torch.dtype) -> Tensor:
    """w_j q_j with q = (1-e) p + e/V: what multiplies lse - x_j in the loss of class probabilities p."""
    q = target.to(dtype)
    if label_smoothing > 0.0:
        q = q * (1 - label_smoothing) + label_smoothing / target.shape[-1]
    return q if weight is None else q * weight.to(dtype)


def soft_cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(loss, lse), each (...): loss = sum_j w_j q_j (lse - x_j)."""
    x = activation(logits, softcap, logit_scale)
    maximum, log_sum = _logsumexp(x)
    q = weighted_probabilities(target, weight, label_smoothing, x.dtype)
    return (q * (maximum - x + log_sum)).sum(-1), (maximum + log_sum).squeeze(-1)


def soft_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """grad_logits (..., V): ``(a sum(w q) + b) softmax_j - a w_j q_j`` through the activation."""
    x = activation(logits, softcap, logit_scale)
    q = weighted_probabilities(target, weight, label_smoothing, x.dtype)
    a = grad_loss.to(x.dtype)
    mass = q.sum(-1)
    unread = (a == 0) & ~mass.isfinite()  # as in _finish, whatever the probabilities hold
    q = torch.where(unread.unsqueeze(-1), 0.0, q)
    total = a * torch.where(unread, 0.0, mass)
    if grad_lse is not None:
        total = total + grad_lse.to(x.dtype)
    grad = _softmax_gradient(x, lse, total) - a.unsqueeze(-1) * q
    return _finish(grad, x, lse, total.abs() + a.abs(), logits, softcap, logit_scale)


def soft_target_gradients(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None,
    *,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> tuple[Tensor, Tensor | None]:
    """Gradients for class probabilities (..., V) and their weights (V,): of sum_j w_j q_j (lse - x_j)."""
    x = activation(logits, softcap, logit_scale)
    grad_q = grad_loss.to(x.dtype).unsqueeze(-1) * (lse.unsqueeze(-1) - x)
    grad_target = grad_q * (1 - label_smoothing)
    if weight is None:
        return grad_target.to(target.dtype), None
    q = weighted_probabilities(target, None, label_smoothing, x.dtype)
    # Not flatten(0, -2), for which autograd's vmap (is_grads_batched) has no rule.
    grad_weight = (grad_q * q).sum(tuple(range(logits.dim() - 1))) if logits.dim() > 1 else grad_q * q
    return (grad_target * weight.to(x.dtype)).to(target.dtype), grad_weight.to(weight.dtype)
