"""Divergences between a student's and a teacher's softmax, each of them differentiable in the student. Plain torch.

Per row, with s and t the softmax of the student's and the teacher's x, each divided by the temperature,
m = (1 - beta) s + beta t, and t' the teacher's probabilities by another lse if one is given (that of more classes):

    values       kl = KL(t || s), reverse_kl = KL(s || t), mixture = beta KL(t || m) + (1 - beta) KL(s || m),
                 overlap = sum_j min(s_j, t'_j), log_prob of the target at a temperature of one
    statistics   lse of the student, lse of the teacher, KL(s || t), KL(s || m), the lower mass: the sum of the s_j with
                 s_j <= t'_j, the lse of log_prob, the lse of t'

    grad_x_j = c_kl (s_j - t_j) + c_reverse s_j (log s_j - log t_j - KL(s || t))
             + c_mixture (1 - beta) s_j (log s_j - log m_j - KL(s || m))
             + c_overlap s_j ([s_j <= t'_j] - lower mass) + c_log_prob (hot_j - p_j)

A value that is not in ``fields`` is 0 and its coefficient is not read. A probability of 0 adds nothing. The mixture and
the overlap are computed from x - lse with the lse as it is returned, so that the gradient sees the same s_j <= t'_j.

For a slice of the classes the first call returns the lse's and the KL's within it; with ``joined`` statistics a second
one returns the slice's parts of mixture, overlap, KL(s || m) and the lower mass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .divergences import FIELDS, Divergences, FixedLoss
from .options import RowOptions
from .reference import _logsumexp, accumulator, activation, activation_derivative, gather_target, is_counted
from .reference_ids import Columns
from .reference_ids import columns as columns_of_ids


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


def divergences_forward(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    teacher_lse: Tensor | None = None,  # of t'
    joined: Tensor | None = None,
    class_start: int | None = None,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    """(values (5, ...), statistics (7, ...)), 0 in ignored rows."""
    spec, dtype = Divergences(**fields), accumulator(logits)
    columns, all_classes = spec.columns(logits, class_start), class_start is None
    x, y = _x(logits, spec.student(), columns, dtype), _x(teacher_logits, spec.teacher(), columns, dtype)
    zero = x.new_zeros(x.shape[:-1])
    values, student_kl, lower_mass = dict.fromkeys(FIELDS, zero), zero, zero  # one tensor, which nobody writes
    if joined is None:
        (log_s, lse), (log_t, lse_t) = _log_softmax(x), _log_softmax(y)
        hard_lse, lse_all = lse, lse_t if teacher_lse is None else teacher_lse.to(dtype)
        log_p = log_s
        if spec.other_lse():
            log_p, hard_lse = _log_softmax(_x(logits, spec.options, columns, dtype))
        if spec.reads("kl"):
            values["kl"] = _expectation(log_t.exp(), log_t - log_s)
        if spec.reads("reverse_kl"):
            values["reverse_kl"] = _expectation(log_s.exp(), log_s - log_t)
        if spec.reads("log_prob") and all_classes:
            index, _, invalid = gather_target(target, columns, spec.options.ignore_index)
            values["log_prob"] = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(invalid, float("nan"))
    else:
        lse, lse_t, _, _, _, hard_lse, lse_all = joined.to(dtype).unbind()
    if spec.visits_again() and (all_classes or joined is not None):
        log_s, log_t = x - lse.unsqueeze(-1), y - lse_t.unsqueeze(-1)
        s, t = log_s.exp(), log_t.exp()
        if spec.reads("mixture"):
            log_m = _log_mixture(log_s, log_t, spec.beta)
            student_kl = _expectation(s, log_s - log_m)
            values["mixture"] = spec.beta * _expectation(t, log_t - log_m) + (1 - spec.beta) * student_kl
        if spec.reads("overlap"):
            log_t_all = y - lse_all.unsqueeze(-1)
            values["overlap"] = torch.minimum(s, log_t_all.exp()).sum(-1)
            lower_mass = torch.where(log_s <= log_t_all, s, 0.0).sum(-1)
    counted = is_counted(target, spec.options.ignore_index)
    statistics = torch.stack([lse, lse_t, values["reverse_kl"], student_kl, lower_mass, hard_lse, lse_all])
    packed = torch.stack([values[name] for name in FIELDS])
    return torch.where(counted, packed, 0.0), torch.where(counted, statistics, 0.0)


def _targets(target: Tensor, columns: int, class_start: int | None, spec: Divergences) -> Columns:
    slice_args = (0, None) if class_start is None else (class_start, spec.num_classes)
    return columns_of_ids(target, columns, *slice_args, spec.options.ignore_index)


def _divergence_gradient(s: Tensor, ratio: Tensor, kl: Tensor) -> Tensor:
    """s_j (ratio_j - kl), for ratio = log s - log q and kl = KL(s || q)."""
    distance = torch.where(ratio == math.inf, math.inf, ratio - kl.unsqueeze(-1))  # not inf - inf
    return torch.where(s == 0.0, 0.0, s * distance)


def divergences_backward(
    grad_values: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    class_start: int | None = None,
    grad_dtype: torch.dtype | None = None,
    **fields: Any,
) -> Tensor:
    """grad_logits (..., V) in grad_dtype or the logits' dtype, from the gradients of the values, (5, ...)."""
    spec, dtype = Divergences(**fields), accumulator(logits)
    columns = spec.columns(logits, class_start)
    lse, lse_t, reverse_kl, student_kl, lower_mass, hard_lse, lse_all = statistics.to(dtype).unbind()
    counted = is_counted(target, spec.options.ignore_index)
    x, y = _x(logits, spec.student(), columns, dtype), _x(teacher_logits, spec.teacher(), columns, dtype)
    log_s, log_t = x - lse.unsqueeze(-1), y - lse_t.unsqueeze(-1)
    s = log_s.exp()
    grad = torch.zeros_like(x)

    def add(name: str, term: Tensor) -> None:
        # A row without this gradient gets exact zeros, even where the term is not finite.
        nonlocal grad
        c = torch.where(counted, grad_values[FIELDS.index(name)].to(dtype), 0.0).unsqueeze(-1)
        grad = grad + torch.where(c == 0.0, 0.0, c * term)

    if spec.reads("kl"):
        add("kl", s - log_t.exp())
    if spec.reads("reverse_kl"):
        add("reverse_kl", _divergence_gradient(s, log_s - log_t, reverse_kl))
    if spec.reads("mixture"):
        ratio = log_s - _log_mixture(log_s, log_t, spec.beta)
        add("mixture", (1 - spec.beta) * _divergence_gradient(s, ratio, student_kl))
    if spec.reads("overlap"):
        below = (log_s <= y - lse_all.unsqueeze(-1)).to(dtype)
        add("overlap", s * (below - lower_mass.unsqueeze(-1)))
    if spec.reads("log_prob"):
        at = _targets(target, columns, class_start, spec)
        p = s if spec.temperature == 1.0 else (spec.temperature * x - hard_lse.unsqueeze(-1)).exp()
        hot = at.here.unsqueeze(-1) & (torch.arange(columns, device=p.device) == at.column.unsqueeze(-1))
        add("log_prob", spec.temperature * (hot.to(dtype) - p).masked_fill(at.invalid.unsqueeze(-1), float("nan")))
    slope = activation_derivative(x, spec.student())
    grad = torch.where(grad == 0.0, 0.0, grad * slope).to(grad_dtype or logits.dtype)
    if spec.num_classes is not None:
        grad = torch.nn.functional.pad(grad, (0, logits.shape[-1] - columns))
    return grad.contiguous()


def divergences_with_grad(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    *,
    hard_weight: float = 0.0,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    """The loss of one divergence, and the gradient of grad_scale * loss summed over counted rows."""
    loss = FixedLoss(Divergences(**fields), hard_weight)
    values, statistics = divergences_forward(logits, teacher_logits, target, **fields)
    upstream = loss.upstream(grad_scale.to(values.dtype).expand(target.shape))
    return loss.of(values), divergences_backward(upstream, logits, teacher_logits, target, statistics, **fields)
