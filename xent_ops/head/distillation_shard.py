"""One rank's rows of a student's head and of its teacher's: what a rank hands over, the join, a chunk of rows.

By the chain rule a divergence is that within the ranks' slices and that between them. With the lse's of a slice l_r (of
the student) and u_r (of the teacher), and those of all, l and u::

    KL(t || s) = sum_r T_r (KL_r + log T_r - log S_r),   log S_r = l_r - l,   log T_r = u_r - u

where KL_r is between the two distributions within the slice. So at a beta of 0 or 1 a rank hands over three numbers a
row, l_r, u_r and KL_r. In between it hands over two, for the mixture is known only behind the join; the parts of its
sums (the divergence, and the KL that the gradient wants) are gathered after it. A cross entropy on the target adds x of
the target, 0 where it is on another rank, and the student's lse at a temperature of one where that is another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.distillation import Distillation
from ..kernels.reference import is_counted
from ..kernels.reference_ids import gather
from ..kernels.reference_shard import HEADER, header, places, tiles
from .chunks import classes_of
from .shard import padded_logits

_ops = torch.ops.xent
_NOTHING = float("-inf")  # the logarithm of the share of a slice that has none


def _at_an_end(how: Distillation) -> bool:
    return how.beta == 0.0 or how.beta == 1.0


def _numbers(how: Distillation) -> int:
    """Of a row."""
    # Conditions, not sums of booleans: to Dynamo the numbers of `how` may be symbols, which torch 2.11 cannot add up.
    of_target = (1 if how.temperature == 1.0 else 2) if how.hard_weight != 0.0 else 0
    return (3 if _at_an_end(how) else 2) + of_target


def width(rows: int, how: Distillation) -> int:
    """How many numbers a rank hands over."""
    return _numbers(how) * rows + HEADER


def statistics_of_chunk(
    logits: Tensor,  # (n, columns)
    teacher_logits: Tensor,  # likewise
    target: Tensor,
    class_start: int,
    how: Distillation,
) -> Tensor:
    """(1, width)."""
    loss, statistics = _ops.distillation_forward(logits, teacher_logits, target, None, class_start, **how.keywords())
    made = [statistics[0], statistics[1]]
    if _at_an_end(how):
        made.append(loss)
    if how.hard_weight != 0.0:
        made.append(gather(logits, target.unsqueeze(-1), class_start, how.num_classes, how.options).squeeze(-1))
        if how.temperature != 1.0:
            made.append(statistics[3])
    columns = logits.shape[1]
    return torch.cat([*made, header(class_start, columns, loss.new_full((), columns))]).unsqueeze(0)


class Rows(NamedTuple):
    """What all ranks know of the rows, the same bits on each. In ignored rows statistics may hold anything."""

    loss: Tensor  # (n,)
    statistics: Tensor  # (4, n), as distillation_backward takes them


def joined(gathered: Tensor, target: Tensor, how: Distillation) -> Rows:
    """From what all ranks handed over, (ranks, width). Of a beta between 0 and 1 without the divergence."""
    assert how.num_classes is not None
    tiled = tiles(*places(gathered[:, -HEADER:]), how.num_classes)
    of_slices = gathered[:, :-HEADER].view(gathered.shape[0], _numbers(how), target.shape[0])
    values = iter(of_slices.unbind(1))
    of_slice, of_teacher = next(values), next(values)
    lse, teacher_lse = of_slice.logsumexp(0), of_teacher.logsumexp(0)
    log_s, log_t = of_slice - lse, of_teacher - teacher_lse
    loss = of_student = torch.zeros_like(lse)
    if how.beta == 0.0:
        loss = _chained(log_t, log_s, next(values))
    elif how.beta == 1.0:
        loss = of_student = _chained(log_s, log_t, next(values))
    hard_lse = lse
    if how.hard_weight != 0.0:
        at_target = next(values).sum(0)
        hard_lse = lse if how.temperature == 1.0 else next(values).logsumexp(0)
        loss = loss + how.hard_weight * (hard_lse - at_target)
    lse = torch.where(tiled, lse, float("nan"))
    return Rows(
        _counted(torch.where(tiled, loss, float("nan")), target, how),
        torch.stack([lse, teacher_lse, of_student, hard_lse]),
    )


def _chained(log_p: Tensor, log_q: Tensor, within: Tensor) -> Tensor:
    """KL(p || q) from the slices' shares and what is within them, which says nothing of a slice without a share."""
    p = log_p.exp()
    within = torch.where((log_p == _NOTHING) | (log_q == _NOTHING), 0.0, within)
    return torch.where(p == 0.0, 0.0, p * (within + log_p - log_q)).sum(0)


def _counted(loss: Tensor, target: Tensor, how: Distillation) -> Tensor:
    return torch.where(is_counted(target, how.options.ignore_index), loss, 0.0)


def parts(
    logits: Tensor, teacher_logits: Tensor, target: Tensor, rows: Rows, class_start: int, how: Distillation
) -> Tensor | None:
    """(1, 2 n): of the sums with the mixture, those over this slice; None at an end, where there is no mixture."""
    if _at_an_end(how):
        return None
    given = (logits, teacher_logits, target, rows.statistics, class_start)
    divergence, statistics = _ops.distillation_forward(*given, **how.keywords())
    return torch.cat([divergence, statistics[2]]).unsqueeze(0)


def with_parts(rows: Rows, gathered: Tensor, target: Tensor, how: Distillation) -> Rows:
    """From the parts of all ranks, (ranks, 2 n)."""
    divergence, of_student = gathered.view(gathered.shape[0], 2, -1).sum(0).unbind()
    lse, teacher_lse, _, hard_lse = rows.statistics.unbind()
    statistics = torch.stack([lse, teacher_lse, of_student, hard_lse])
    return Rows(rows.loss + _counted(divergence, target, how), statistics)


# A chunk at a time, for loop.py; its logits (rows, padded_classes) live from the first to the last.


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
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(what ``joined`` takes of this rank, the student's logits, the teacher's)."""
    how, made = Distillation(**given), []
    heads = ((input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias))
    for rows, weight, bias in heads:
        head, bias, _, _ = classes_of(weight, bias, None, class_start, how.num_classes)
        made.append((padded(rows, head, bias), head.shape[0]))
    of_classes = [logits[:, :columns] for logits, columns in made]
    stats = statistics_of_chunk(of_classes[0], of_classes[1], target, class_start, how)
    return stats, made[0][0], made[1][0]


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
    **given: Any,
) -> tuple[Tensor, Tensor]:
    how = Distillation(**given)
    head, _, _, _ = classes_of(linear_weight, None, None, class_start, how.num_classes)
    of_classes, of_teacher = logits[:, : head.shape[0]], teacher_logits[:, : head.shape[0]]
    _ops.distillation_backward_(grad_loss, of_classes, of_teacher, target, statistics, class_start, **how.keywords())
    none = linear_weight.new_empty(0)
    return torch.mm(of_classes, head) if with_grad_input else none, linear_weight.new_empty(0)
