"""The loss in plain torch. It is the CPU's kernel if C++ is not built, and Inductor compiles its backward.

Per row, with x = softcap(logit_scale * logits), softcap(z) = cap * tanh(z / cap), V classes, target t, class
weights w (1 without class weights) and label smoothing e:

    lse  = logsumexp_j x_j
    loss = w_t (1-e) (lse - x_t) + (e/V) sum_j w_j (lse - x_j)           0 where t == ignore_index
    grad_x_j                                                             see ``cross_entropy_backward``

Sources: F.cross_entropy for weights and smoothing, Gemma 2 for the softcap. Everything is computed in float32
(float64 for float64 logits). Functions take logits (..., V) of any strides.
The backward functions are differentiable: second derivatives are their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .options import DEFAULTS, RowOptions


def accumulator(logits: Tensor) -> torch.dtype:
    """The dtype of loss and lse: float64 for float64 logits, float32 for all others."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def activation(logits: Tensor, options: RowOptions) -> Tensor:
    x = logits.to(accumulator(logits))
    if options.logit_scale != 1.0:
        x = x * options.logit_scale
    return x if options.softcap is None else options.softcap * torch.tanh(x / options.softcap)


def activation_derivative(x: Tensor, options: RowOptions) -> Tensor | float:
    if options.softcap is None:
        return options.logit_scale
    return options.logit_scale * (1 - (x / options.softcap).square())


def is_counted(target: Tensor, ignore_index: int) -> Tensor:
    """(...): not ignored. It compares in int64: uint8 would wrap -100 around, and class 156 would count as ignored."""
    return target.to(torch.int64) != ignore_index


def gather_target(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(index safe to gather with, is counted, is counted and out of range), each of the target's shape."""
    indices = target.to(torch.int64)
    counted = is_counted(indices, ignore_index)
    inside = (indices >= 0) & (indices < classes)
    return torch.where(counted & inside, indices, 0), counted, counted & ~inside


def weights_at(weight: Tensor, index: Tensor) -> Tensor:
    """``weight[index]``. Python's brackets read a 0-d index (the target of one unbatched row) into an int. That
    synchronises a GPU and breaks a graph."""
    return torch.ops.aten.index.Tensor(weight, [index])


def _logsumexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """(max, log of the sum of exp(x - max)), each (..., 1). Two numbers keep the digits of lse - x_t."""
    maximum = x.amax(-1, keepdim=True)
    maximum = torch.where(maximum == float("-inf"), 0.0, maximum)
    return maximum, (x - maximum).exp().sum(-1, keepdim=True).log()


def split_lse(maximum: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """(lse, lse_low): the sum, and what rounding it took, which is a constant; 0 if the lse is not finite.

    |lse_low| is at most log V, so softmax_j = exp(x_j - lse) exp(-lse_low), whose last factor is one of the row.
    Knuth's sum of two numbers (The Art of Computer Programming 2, 4.2.2, theorem B).
    """
    lse = maximum + log_sum
    a, b, total = maximum.detach(), log_sum.detach(), lse.detach()
    added = total - a
    low = (a - (total - added)) + (b - added)
    return lse, torch.where(low.isfinite(), low, 0.0)


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, lse_low), each (...). A target out of range gives NaN."""
    classes, label_smoothing = logits.shape[-1], options.label_smoothing
    index, counted, invalid = gather_target(target, classes, options.ignore_index)
    x = activation(logits, options)
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
    return loss, *split_lse(maximum.squeeze(-1), log_sum.squeeze(-1))


def statistics(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    batch_invariant: bool = False,
    skip_ignored: bool = False,
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, argmax, entropy, lse_low), each (...), argmax and entropy (0,) unless asked for.

    argmax is int64, the first index on ties. entropy = -sum_j softmax_j log softmax_j, where a class of probability 0
    adds 0; it is 0 in ignored rows. With ``skip_ignored`` the lse of an ignored row is infinite and its argmax -1.
    """
    if batch_invariant and target.numel() == 1:  # torch splits the sum of a single row over threads
        two = logits.reshape(1, -1).repeat(2, 1), target.reshape(1).repeat(2)
        flags = (with_argmax, with_entropy, False, skip_ignored)
        first = [value[:1] for value in statistics(*two, weight, *flags, options=options)]
        loss, lse, argmax, entropy, lse_low = (value.view(target.shape if value.numel() else 0) for value in first)
        return loss, lse, argmax, entropy, lse_low
    loss, lse, lse_low = cross_entropy_forward(logits, target, weight, options=options)
    argmax, entropy = logits.new_empty(0, dtype=torch.int64), lse.new_empty(0)
    if with_argmax:
        argmax = activation(logits, options._replace(softcap=None)).argmax(-1)
    if with_entropy:
        maximum, log_sum = _logsumexp(x := activation(logits, options))
        log_p = x - maximum - log_sum  # not x - lse: the lse has been rounded
        p = log_p.exp()
        entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)
        entropy = torch.where(is_counted(target, options.ignore_index), entropy, 0.0)
    if skip_ignored:
        counted = is_counted(target, options.ignore_index)
        lse, lse_low = torch.where(counted, lse, float("inf")), torch.where(counted, lse_low, 0.0)
        argmax = torch.where(counted, argmax, -1) if with_argmax else argmax
    return loss, lse, argmax, entropy, lse_low


def softmax_gradient(
    x: Tensor, lse: Tensor, total: Tensor, entropy: Tensor | None = None, grad_entropy: Tensor | None = None
) -> Tensor:
    """``A softmax_j``, and the entropy H's gradient: ``-grad_entropy softmax_j (log softmax_j + H)``."""
    log_p = x - lse.unsqueeze(-1)
    p = log_p.exp()
    grad = total.unsqueeze(-1) * p
    if grad_entropy is not None and entropy is not None:
        # log 0 is removed before the multiplication: the outer where alone leaves 0 * inf in second derivatives.
        term = p * (torch.where(p == 0, 0.0, log_p) + entropy.unsqueeze(-1))
        grad = grad - grad_entropy.to(x.dtype).unsqueeze(-1) * torch.where(p == 0, 0.0, term)
    return grad


def fold_low(
    lse_low: Tensor | None, total: Tensor, entropy: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(total, entropy, grad_entropy), by which the rounded lse gives the exact softmax: no work for each class."""
    if lse_low is None:
        return total, entropy, grad_entropy
    low = lse_low.to(total.dtype)
    share = (-low).exp()
    if grad_entropy is not None and entropy is not None:
        grad_entropy, entropy = grad_entropy.to(total.dtype) * share, entropy - low
    return total * share, entropy, grad_entropy


def _finish(grad: Tensor, x: Tensor, lse: Tensor, row_grads: Tensor, dtype: torch.dtype, options: RowOptions) -> Tensor:
    """Apply the activation's derivative and convert to this dtype, contiguous for any strides of the logits.

    A row without an upstream gradient gets exact zeros, even if its logits are not finite (0 * NaN is NaN): it may be
    padding that nothing has written.
    """
    grad = grad * activation_derivative(x, options)
    dead = (row_grads == 0) & ~lse.isfinite()
    return torch.where(dead.unsqueeze(-1), 0.0, grad).to(dtype).contiguous()


def row_grads(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    target: Tensor,
    lse: Tensor,
    divisors: Tensor | None,
    ignore_index: int,
    lse_square_scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of each row's loss and lse, (...), from the divisors of a reduced loss and its z-loss.

    Converted to the accumulator's dtype first: a narrower dtype may overflow or round the quotient.
    """
    a = grad_loss.to(dtype)
    per_row = a
    if divisors is not None:
        per_row, a = a / divisors[1].to(dtype), a / divisors[0].to(dtype)
    if lse_square_scale != 0.0:
        counted = is_counted(target, ignore_index)
        # The where comes last: without a counted row, per_row is infinite.
        square = torch.where(counted, lse.to(dtype) * (2 * lse_square_scale * per_row), 0.0)
        grad_lse = square if grad_lse is None else square + grad_lse.to(dtype)
    return a.expand(lse.shape), grad_lse


def cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisors: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    lse_coefficient: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    grad_dtype: torch.dtype | None = None,
    lse_low: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> Tensor:
    """grad_logits (..., V). Pointwise except for sum(weight): Inductor generates one kernel for it.

    The dtype is grad_dtype, or if that is None the logits' dtype.

    For a reduced loss: grad_loss is (), divisors and lse_square_scale are as in ``cross_entropy_reduced``. For a slice
    of ``num_classes`` classes: lse is of all classes, lse_coefficient is from ``cross_entropy_shard_join`` (1 if
    None), and columns beyond the last class get zeros.

    With a = grad_loss, b = grad_lse, c = grad_entropy and H the entropy:

        grad_x_j = (a lse_coefficient + b) p_j - c p_j (log p_j + H) - a (1-e) w_t [j == t] - a (e/V) w_j
        lse_coefficient = d loss / d lse = w_t (1-e) + (e/V) sum(w)

    Kernels write it as A p_j - B [j == t] - C w_j, without the entropy's term: A = a lse_coefficient + b,
    B = a (1-e) w_t, C = a e/V.

    An ignored row has a = c = w_t = 0 (the weight of an ignored class may be infinite). A row with a target out of
    range has a = NaN.
    """
    width = logits.shape[-1]
    classes = width if num_classes is None else num_classes
    x = activation(logits, options)
    grad_loss, grad_lse = row_grads(
        grad_loss, grad_lse, target, lse, divisors, options.ignore_index, lse_square_scale, x.dtype
    )
    weight = None if weight is None else weight.to(x.dtype)
    total, at_target, by_class, passed = gradient_coefficients(
        grad_loss, grad_lse, target, classes, weight, lse_coefficient, options, x.dtype
    )
    counted = is_counted(target, options.ignore_index)
    at_target = at_target.unsqueeze(-1)
    if weight is not None and lse_coefficient is not None:  # per column: the target may be in another slice
        at_target = at_target * weight
    if grad_entropy is not None:
        grad_entropy = torch.where(counted, grad_entropy.to(x.dtype), 0.0)
        passed = passed + grad_entropy.abs()
    total, entropy, grad_entropy = fold_low(lse_low, total, entropy, grad_entropy)
    grad = softmax_gradient(x, lse, total, entropy, grad_entropy)
    # An ignored row has no target column: the weight of an ignored class may be infinite, and 0 * inf is NaN.
    local = torch.where(counted, target.to(torch.int64) - class_start, -1).unsqueeze(-1)
    column = torch.arange(width, device=logits.device)
    grad = grad - torch.where(column == local, at_target, 0.0)
    if options.label_smoothing > 0.0:
        grad = grad - (by_class.unsqueeze(-1) if weight is None else by_class.unsqueeze(-1) * weight)
    grad = _finish(grad, x, lse, passed, grad_dtype or logits.dtype, options)
    columns = columns_of(width, class_start, classes)
    return grad if columns == width else torch.where(column < columns, grad, 0.0)


def gradient_coefficients(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    target: Tensor,
    classes: int,
    weight: Tensor | None,
    lse_coefficient: Tensor | None,
    options: RowOptions,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(A, B, C, passed), each (...). ``passed`` is a sum of magnitudes: 0 if all gradients of the row are 0.

    Letters as in ``cross_entropy_backward``. For a slice with class weights, B lacks the target's weight.
    """
    index, counted, invalid = gather_target(target, classes, options.ignore_index)
    a = torch.where(counted, grad_loss, 0.0).masked_fill(invalid, float("nan"))
    at_target, by_class = a * (1 - options.label_smoothing), a * (options.label_smoothing / classes)
    total, passed = a, a.abs()
    if lse_coefficient is not None:
        total = a * lse_coefficient.to(dtype)
    elif weight is not None:
        total = at_target = at_target * torch.where(counted, weights_at(weight, index), 0.0)
        passed = total.abs() + by_class.abs()
        if options.label_smoothing > 0.0:
            total = total + by_class * weight.sum()
    if grad_lse is not None:
        total = total + grad_lse.to(dtype)
    return total, at_target, by_class, passed + total.abs()


def columns_of(width: int, class_start: int | None, num_classes: int | None) -> int:
    """The number of columns of a slice, or rows of its head, that are classes. Not negative: checks.shard_range."""
    if num_classes is None:
        return width
    left = num_classes if class_start is None else num_classes - class_start
    return width if width <= left else left


def grad_lse_of_square(grad_lse_square: Tensor | None, lse: Tensor, target: Tensor, ignore_index: int) -> Tensor | None:
    """The gradient of grad_lse_square * lse^2, summed over counted rows; contiguous, whatever the target's strides."""
    if grad_lse_square is None:
        return None
    counted = is_counted(target, ignore_index)
    return torch.where(counted, 2 * grad_lse_square.to(lse.dtype) * lse, 0.0).contiguous()
