"""The generalised Jensen-Shannon divergence between a student and its teacher, in plain torch.

Per row, with s and t the softmax of the student's and the teacher's x, each divided by the temperature, and
m = (1 - beta) s + beta t:

    loss     = beta KL(t || m) + (1 - beta) KL(s || m) + hard_weight * cross entropy of the student
    grad_x_j = (1 - beta) s_j (log s_j - log m_j - KL(s || m)) + ...

The two ends have other formulas. beta 0 is KL(t || s), with the gradient s_j - t_j. beta 1 is KL(s || t), with the
gradient s_j (log s_j - log t_j - KL(s || t)). The cross entropy has a temperature of one.

For a slice of the classes (a rank's, with a ``class_start``) the forward returns the lse's of the slice and, if beta is
0 or 1, the divergence between the two distributions within it; head/distillation_shard.py joins them. For a beta
between 0 and 1, the mixture needs the lse's of all classes first. A second call takes these as ``joined``, and returns
the slice's part of the sums. The join adds the cross entropy on the target. The backward takes the statistics of all
classes.

A probability of 0 adds nothing: 0 log 0 = 0. If a class has a probability in one distribution and none in the other,
the divergence may be infinite, as the formula says. The gradient of KL(s || t) is then +inf in that class and -inf in
all others.

Source: generalized_jsd_loss of TRL's GKDTrainer (Agarwal et al., 2023, On-Policy Distillation of Language Models).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .distillation import Distillation
from .options import RowOptions
from .reference import _logsumexp, accumulator, activation, activation_derivative, gather_target, is_counted
from .reference_ids import Columns
from .reference_ids import columns as columns_of_ids

STATISTICS = 4  # lse of the student and the teacher; KL(student || teacher or mixture); the cross entropy's own lse


def _log_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """(log softmax, lse)."""
    if x.shape[-1] == 0:  # a slice without classes
        return x, x.new_full(x.shape[:-1], -math.inf)
    maximum, log_sum = _logsumexp(x)
    return x - maximum - log_sum, (maximum + log_sum).squeeze(-1)  # not x - lse: the lse has been rounded


def _x(logits: Tensor, options: RowOptions, columns: int, dtype: torch.dtype) -> Tensor:
    return activation(logits[..., :columns].to(dtype), options)


def _expectation(probabilities: Tensor, values: Tensor) -> Tensor:
    """The sum over the classes; a class without probability adds nothing."""
    return torch.where(probabilities == 0.0, 0.0, probabilities * values).sum(-1)


def _log_mixture(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))


def distillation_forward(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    joined: Tensor | None = None,  # the statistics of all classes, without the KL
    class_start: int | None = None,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    """(loss (...), statistics (4, ...)); 0 in ignored rows, where other kernels' statistics may hold any value."""
    spec, dtype = Distillation(**fields), accumulator(logits)
    columns, all_classes = spec.columns(logits, class_start), class_start is None
    x, y = _x(logits, spec.student(), columns, dtype), _x(teacher_logits, spec.teacher(), columns, dtype)
    if joined is None:
        (log_s, lse), (log_t, teacher_lse) = _log_softmax(x), _log_softmax(y)
        hard_lse = lse
    else:
        lse, teacher_lse, _, hard_lse = joined.to(dtype).unbind(0)
        log_s, log_t = x - lse.unsqueeze(-1), y - teacher_lse.unsqueeze(-1)
    s, t = log_s.exp(), log_t.exp()
    if joined is None and not all_classes and 0.0 < spec.beta < 1.0:
        loss = student_kl = torch.zeros_like(lse)
    elif spec.beta == 0.0:
        loss = _expectation(t, log_t - log_s)
        student_kl = torch.zeros_like(loss)
    elif spec.beta == 1.0:
        loss = student_kl = _expectation(s, log_s - log_t)
    else:
        log_m = _log_mixture(log_s, log_t, spec.beta)
        student_kl = _expectation(s, log_s - log_m)
        loss = spec.beta * _expectation(t, log_t - log_m) + (1 - spec.beta) * student_kl
    log_p = log_s
    if joined is None and spec.hard_weight != 0.0 and spec.temperature != 1.0:
        log_p, hard_lse = _log_softmax(_x(logits, spec.options, columns, dtype))
    if all_classes and spec.hard_weight != 0.0:
        index, _, invalid = gather_target(target, columns, spec.options.ignore_index)
        cross_entropy = -log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        loss = loss + spec.hard_weight * cross_entropy.masked_fill(invalid, float("nan"))
    counted = is_counted(target, spec.options.ignore_index)
    statistics = torch.stack([lse, teacher_lse, student_kl, hard_lse])
    return torch.where(counted, loss, 0.0), torch.where(counted, statistics, 0.0)


def _targets(target: Tensor, columns: int, class_start: int | None, spec: Distillation) -> Columns:
    slice_args = (0, None) if class_start is None else (class_start, spec.num_classes)
    return columns_of_ids(target, columns, *slice_args, spec.options.ignore_index)


def distillation_backward(
    grad_loss: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    class_start: int | None = None,
    **fields: Any,
) -> Tensor:
    """grad_logits (..., V) in the logits' dtype. grad_loss is () or (...)."""
    spec, dtype = Distillation(**fields), accumulator(logits)
    columns = spec.columns(logits, class_start)
    lse, teacher_lse, student_kl, hard_lse = statistics.to(dtype).unbind(0)
    x = _x(logits, spec.student(), columns, dtype)
    log_s = x - lse.unsqueeze(-1)
    log_t = _x(teacher_logits, spec.teacher(), columns, dtype) - teacher_lse.unsqueeze(-1)
    s = log_s.exp()
    if spec.beta == 0.0:
        grad = s - log_t.exp()
    else:
        log_m = log_t if spec.beta == 1.0 else _log_mixture(log_s, log_t, spec.beta)
        ratio = log_s - log_m
        distance = torch.where(ratio == math.inf, math.inf, ratio - student_kl.unsqueeze(-1))  # not inf - inf
        grad = torch.where(s == 0.0, 0.0, s * distance)
        if spec.beta != 1.0:
            grad = (1 - spec.beta) * grad
    grad = grad * activation_derivative(x, spec.student())
    if spec.hard_weight != 0.0:
        at = _targets(target, columns, class_start, spec)
        p = s if spec.temperature == 1.0 else (spec.temperature * x - hard_lse.unsqueeze(-1)).exp()
        hot = at.here.unsqueeze(-1) & (torch.arange(columns, device=p.device) == at.column.unsqueeze(-1))
        p = (p - hot.to(dtype)) * (activation_derivative(x, spec.student()) * spec.temperature)
        grad = grad + spec.hard_weight * p.masked_fill(at.invalid.unsqueeze(-1), float("nan"))
    a = torch.where(is_counted(target, spec.options.ignore_index), grad_loss.to(dtype), 0.0).unsqueeze(-1)
    grad = torch.where(a == 0.0, 0.0, a * grad).to(logits.dtype)
    if spec.num_classes is not None:
        grad = torch.nn.functional.pad(grad, (0, logits.shape[-1] - columns))
    return grad.contiguous()


def distillation_with_grad(
    logits: Tensor, teacher_logits: Tensor, target: Tensor, grad_scale: Tensor, **fields: Any
) -> tuple[Tensor, Tensor]:
    """(loss, gradient of grad_scale * loss summed over counted rows)."""
    loss, statistics = distillation_forward(logits, teacher_logits, target, **fields)
    return loss, distillation_backward(grad_scale, logits, teacher_logits, target, statistics, **fields)
