"""Distillation where each rank holds a slice of both heads' classes: packed statistics, the join, one chunk of rows.

The chain rule splits a divergence into a part within the ranks' slices and a part between them. l_r is the student's
lse of slice r and u_r the teacher's; l and u are the lse's of all classes::

    KL(t || s) = sum_r T_r (KL_r + log T_r - log S_r),   log S_r = l_r - l,   log T_r = u_r - u

KL_r is between the two distributions within the slice. At a beta of 0 or 1 a rank therefore packs three numbers per
row: l_r, u_r and KL_r. In between it packs l_r and u_r only, because the mixture needs the join. Its parts of two
sums, the divergence and the KL that the gradient needs, are gathered after that. A cross entropy on the target adds
x of the target (0 if it is on another rank) and, unless the temperature is one, the student's lse at one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.distillation import Distillation
from ..kernels.reference import is_counted
from ..kernels.reference_ids import columns, gather
from ..kernels.reference_shard import HEADER, header, shard_ranges, tiles
from .chunk import padded_logits
from .chunks import classes_of

_ops = torch.ops.xent
_NO_SHARE = float("-inf")  # the logarithm of the share of a slice without probability


def _without_mixture(spec: Distillation) -> bool:
    return spec.beta == 0.0 or spec.beta == 1.0


def _numbers_per_row(spec: Distillation) -> int:
    # Conditions, not sums of booleans: to Dynamo the numbers of a spec may be symbols, which torch 2.11 cannot add.
    target_numbers = (1 if spec.temperature == 1.0 else 2) if spec.hard_weight != 0.0 else 0
    return (3 if _without_mixture(spec) else 2) + target_numbers


def width(rows: int, spec: Distillation) -> int:
    """The number of values in the packed statistics of a rank."""
    return _numbers_per_row(spec) * rows + HEADER


def chunk_statistics(
    logits: Tensor,  # (n, columns)
    teacher_logits: Tensor,  # (n, columns)
    target: Tensor,
    class_start: int,
    spec: Distillation,
) -> Tensor:
    """(1, width)."""
    loss, statistics = _ops.distillation_forward(logits, teacher_logits, target, None, class_start, **spec.keywords())
    numbers = [statistics[0], statistics[1]]
    if _without_mixture(spec):
        numbers.append(loss)
    if spec.hard_weight != 0.0:
        options, place = spec.options, (logits.shape[1], class_start, spec.num_classes)
        at = columns(target.unsqueeze(-1), *place, options.ignore_index)
        numbers.append(gather(logits, at, options).squeeze(-1))
        if spec.temperature != 1.0:
            numbers.append(statistics[3])
    width = logits.shape[1]
    return torch.cat([*numbers, header(class_start, width, loss.new_full((), width))]).unsqueeze(0)


class Rows(NamedTuple):
    """What all ranks know of the rows, with the same bits on each. Statistics of ignored rows may hold any value."""

    loss: Tensor  # (n,)
    statistics: Tensor  # (4, n), as distillation_backward takes them


def join_statistics(gathered: Tensor, target: Tensor, spec: Distillation) -> Rows:
    """Join the packed statistics of all ranks, (ranks, width). With a mixture the loss still lacks the divergence."""
    assert spec.num_classes is not None
    tiled = tiles(*shard_ranges(gathered[:, -HEADER:]), spec.num_classes)
    numbers = gathered[:, :-HEADER].view(gathered.shape[0], _numbers_per_row(spec), target.shape[0])
    values = iter(numbers.unbind(1))
    slice_lse, slice_teacher_lse = next(values), next(values)
    lse, teacher_lse = slice_lse.logsumexp(0), slice_teacher_lse.logsumexp(0)
    log_s, log_t = slice_lse - lse, slice_teacher_lse - teacher_lse
    loss = student_kl = torch.zeros_like(lse)
    if spec.beta == 0.0:
        loss = _chained(log_t, log_s, next(values))
    elif spec.beta == 1.0:
        loss = student_kl = _chained(log_s, log_t, next(values))
    hard_lse = lse
    if spec.hard_weight != 0.0:
        at_target = next(values).sum(0)
        hard_lse = lse if spec.temperature == 1.0 else next(values).logsumexp(0)
        loss = loss + spec.hard_weight * (hard_lse - at_target)
    lse = torch.where(tiled, lse, float("nan"))
    return Rows(
        _counted(torch.where(tiled, loss, float("nan")), target, spec),
        torch.stack([lse, teacher_lse, student_kl, hard_lse]),
    )


def _chained(log_p: Tensor, log_q: Tensor, slice_kl: Tensor) -> Tensor:
    """KL(p || q) from the slices' shares and the KL within each slice. The KL of a slice without share is not read."""
    p = log_p.exp()
    slice_kl = torch.where((log_p == _NO_SHARE) | (log_q == _NO_SHARE), 0.0, slice_kl)
    return torch.where(p == 0.0, 0.0, p * (slice_kl + log_p - log_q)).sum(0)


def _counted(loss: Tensor, target: Tensor, spec: Distillation) -> Tensor:
    return torch.where(is_counted(target, spec.options.ignore_index), loss, 0.0)


def mixture_sums(
    logits: Tensor, teacher_logits: Tensor, target: Tensor, rows: Rows, class_start: int, spec: Distillation
) -> Tensor | None:
    """(1, 2 n): this slice's parts of the mixture's sums. None at a beta of 0 or 1, where there is no mixture."""
    if _without_mixture(spec):
        return None
    slice_args = (logits, teacher_logits, target, rows.statistics, class_start)
    divergence, statistics = _ops.distillation_forward(*slice_args, **spec.keywords())
    return torch.cat([divergence, statistics[2]]).unsqueeze(0)


def add_mixture_sums(rows: Rows, gathered: Tensor, target: Tensor, spec: Distillation) -> Rows:
    """Add the sums of all ranks, (ranks, 2 n)."""
    divergence, student_kl = gathered.view(gathered.shape[0], 2, -1).sum(0).unbind()
    lse, teacher_lse, _, hard_lse = rows.statistics.unbind()
    statistics = torch.stack([lse, teacher_lse, student_kl, hard_lse])
    return Rows(rows.loss + _counted(divergence, target, spec), statistics)


# One chunk at a time, for loop.py. A chunk's logits (rows, padded_classes) live from its first operator to its last.


def chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    class_start: int,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    after: Tensor | None = None,
    padded: Callable[..., Tensor] = padded_logits,
    **fields: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(the packed statistics of this rank, the student's logits, the teacher's)."""
    spec, padded_chunks = Distillation(**fields), []
    heads = ((input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias))
    for rows, weight, bias in heads:
        head, bias, _, _ = classes_of(weight, bias, None, class_start, spec.num_classes)
        padded_chunks.append((padded(rows, head, bias), head.shape[0]))
    class_logits = [logits[:, :columns] for logits, columns in padded_chunks]
    statistics = chunk_statistics(class_logits[0], class_logits[1], target, class_start, spec)
    return statistics, padded_chunks[0][0], padded_chunks[1][0]


def chunk_grad_(
    logits: Tensor,
    grad_loss: Tensor,
    teacher_logits: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    statistics: Tensor,
    class_start: int,
    with_grad_input: bool = True,
    after: Tensor | None = None,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    spec = Distillation(**fields)
    head, _, _, _ = classes_of(linear_weight, None, None, class_start, spec.num_classes)
    class_logits, teacher_class_logits = logits[:, : head.shape[0]], teacher_logits[:, : head.shape[0]]
    _ops.distillation_backward_(
        grad_loss, class_logits, teacher_class_logits, target, statistics, class_start, **spec.keywords()
    )
    none = linear_weight.new_empty(0)
    return torch.mm(class_logits, head) if with_grad_input else none, linear_weight.new_empty(0)
