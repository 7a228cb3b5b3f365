"""Divergences between a student's and a teacher's softmax, each of them differentiable in the student. Plain torch.

Per row, with s and t the softmax of the student's and the teacher's x, each divided by the temperature,
m = (1 - beta) s + beta t, and t' the teacher's probabilities by another lse if one is given (that of more classes):

    values       kl = KL(t || s), reverse_kl = KL(s || t), mixture = beta KL(t || m) + (1 - beta) KL(s || m),
                 overlap = sum_j min(s_j, t'_j), log_prob of the target at a temperature of one
    statistics   lse of the student, lse of the teacher, KL(s || t), KL(s || m), the lower mass: the sum of the s_j with
                 s_j <= t'_j, the lse of log_prob, the lse of t'; behind them lse_low of these four lse's

    grad_x_j = c_kl (s_j - t_j) + c_reverse s_j (log s_j - log t_j - KL(s || t))
             + c_mixture (1 - beta) s_j (log s_j - log m_j - KL(s || m))
             + c_overlap s_j ([s_j <= t'_j] - lower mass) + c_log_prob (hot_j - p_j)

A value that is not in ``fields`` is 0 and its coefficient is not read. A probability of 0 adds nothing. The mixture and
the overlap are computed from (x - lse) - lse_low as they are returned, so that the gradient sees the same s_j <= t'_j.

For a slice of the classes the first call returns the lse's and the KL's within it; with ``joined`` statistics a second
one returns the slice's parts of mixture, overlap, KL(s || m) and the lower mass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .divergences import FIELDS, Divergences, FixedLoss
from .options import RowOptions
from .reference import _logsumexp, accumulator, activation, activation_derivative, gather_target, is_counted, split_lse
from .reference_ids import Columns
from .reference_ids import columns as columns_of_ids


class _Lse(NamedTuple):
    """Two numbers a row, (...), whose sum has the digits of log probabilities."""

    lse: Tensor
    low: Tensor

    def below(self, x: Tensor) -> Tensor:
        return (x - self.lse.unsqueeze(-1)) - self.low.unsqueeze(-1)


def _lse_of(x: Tensor) -> _Lse:
    if x.shape[-1] == 0:  # a slice without classes
        none = x.new_full(x.shape[:-1], -math.inf)
        return _Lse(none, torch.zeros_like(none))
    return _Lse(*[part.squeeze(-1) for part in split_lse(*_logsumexp(x))])


def _lses(statistics: Sequence[Tensor]) -> list[_Lse]:
    """Of the student, of the teacher, of log_prob and of t'."""
    return [_Lse(statistics[high], statistics[low]) for high, low in ((0, 7), (1, 8), (5, 9), (6, 10))]


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
    teacher_lse: Tensor | None = None,  # (2, ...), of t', and its lse_low
    joined: Tensor | None = None,
    class_start: int | None = None,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    """(values (5, ...), statistics (11, ...)), 0 in ignored rows."""
    spec, dtype = Divergences(**fields), accumulator(logits)
    columns, all_classes = spec.columns(logits, class_start), class_start is None
    x, y = _x(logits, spec.student(), columns, dtype), _x(teacher_logits, spec.teacher(), columns, dtype)
    zero = x.new_zeros(x.shape[:-1])
    values, student_kl, lower_mass = dict.fromkeys(FIELDS, zero), zero, zero  # one tensor, which nobody writes
    if joined is None:
        student, teacher = _lse_of(x), _lse_of(y)
        log_s, log_t = student.below(x), teacher.below(y)
        hard, of_all = student, teacher if teacher_lse is None else _Lse(*teacher_lse.to(dtype).unbind())
        log_p = log_s
        if spec.other_lse():
            hard_x = _x(logits, spec.options, columns, dtype)
            hard = _lse_of(hard_x)
            log_p = hard.below(hard_x)
        if spec.reads("kl"):
            values["kl"] = _expectation(log_t.exp(), log_t - log_s)
        if spec.reads("reverse_kl"):
            values["reverse_kl"] = _expectation(log_s.exp(), log_s - log_t)
        if spec.reads("log_prob") and all_classes:
            index, _, invalid = gather_target(target, columns, spec.options.ignore_index)
            values["log_prob"] = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(invalid, float("nan"))
    else:
        student, teacher, hard, of_all = _lses(joined.to(dtype).unbind())
    if spec.visits_again() and (all_classes or joined is not None):
        log_s, log_t = student.below(x), teacher.below(y)
        s, t = log_s.exp(), log_t.exp()
        if spec.reads("mixture"):
            log_m = _log_mixture(log_s, log_t, spec.beta)
            student_kl = _expectation(s, log_s - log_m)
            values["mixture"] = spec.beta * _expectation(t, log_t - log_m) + (1 - spec.beta) * student_kl
        if spec.reads("overlap"):
            log_t_all = of_all.below(y)
            values["overlap"] = torch.minimum(s, log_t_all.exp()).sum(-1)
            lower_mass = torch.where(log_s <= log_t_all, s, 0.0).sum(-1)
    counted = is_counted(target, spec.options.ignore_index)
    sums = (values["reverse_kl"], student_kl, lower_mass)
    lses, lows = zip(student, teacher, hard, of_all, strict=True)
    statistics = torch.stack([*lses[:2], *sums, *lses[2:], *lows])
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
    saved = statistics.to(dtype).unbind()
    (student, teacher, hard, of_all), (reverse_kl, student_kl, lower_mass) = _lses(saved), saved[2:5]
    counted = is_counted(target, spec.options.ignore_index)
    x, y = _x(logits, spec.student(), columns, dtype), _x(teacher_logits, spec.teacher(), columns, dtype)
    log_s, log_t = student.below(x), teacher.below(y)
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
        below = (log_s <= of_all.below(y)).to(dtype)
        add("overlap", s * (below - lower_mass.unsqueeze(-1)))
    if spec.reads("log_prob"):
        at = _targets(target, columns, class_start, spec)
        p = s if spec.temperature == 1.0 else hard.below(spec.temperature * x).exp()
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
    grad_dtype: torch.dtype | None = None,
    *,
    hard_weight: float = 0.0,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    """The loss of one divergence, and the gradient of grad_scale * loss summed over counted rows."""
    loss = FixedLoss(Divergences(**fields), hard_weight)
    values, statistics = divergences_forward(logits, teacher_logits, target, **fields)
    upstream = loss.upstream(grad_scale.to(values.dtype).expand(target.shape))
    row_args = (upstream, logits, teacher_logits, target, statistics, None, grad_dtype)
    return loss.of(values), divergences_backward(*row_args, **fields)
