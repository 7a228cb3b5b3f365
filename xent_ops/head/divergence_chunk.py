"""Divergences of two heads by chunks of rows, for loop.py: all classes, or a rank's slice of both heads' classes.

A chunk of all classes has the operator's values and statistics. For slices the chain rule splits a divergence into a
part within the ranks' slices and a part between them. l_r is the student's lse of slice r and u_r the teacher's; l and
u are the lse's of all classes::

    KL(t || s) = sum_r T_r (KL_r + log T_r - log S_r),   log S_r = l_r - l,   log T_r = u_r - u

KL_r is between the two distributions within the slice. A rank packs l_r and u_r; and, each only if a value needs it,
KL_r of both directions, x of the target (0 if it is on another rank) and the student's lse at a temperature of one.
Each lse comes with its lse_low. The mixture and the overlap need the lse's of all classes first: a second gather sends
their parts, 2 numbers a row for each.

With ``with_tops`` a slice also packs the largest x of each head and its place among the slice's teacher classes.

With ``classes``, which are places in the slice's teacher head, u_r is over these. A slice packs the lse of all of its
teacher's classes too, and with its top whether that is one of the student's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.divergences import FIELDS, Divergences
from ..kernels.options import RowOptions
from ..kernels.reference import is_counted, split_lse
from ..kernels.reference_ids import columns as columns_of_ids
from ..kernels.reference_ids import gather
from ..kernels.reference_shard import HEADER, header, shard_ranges, tiles
from ..kernels.rows import first_columns
from .chunks import classes_of
from .divergences import TeacherRows, dtype_of_teacher, nan_unless_different, teacher_rows, top_classes, tops
from .loop import ChunkLogits, HeadSlice, OneRank, RowRange

_ops = torch.ops.xent
_NO_SHARE = float("-inf")  # the logarithm of the share of a slice without probability
_AGAIN = {"mixture": "mixture_kl", "overlap": "lower_mass"}  # of the second visit: each value, and its statistic
_STATISTICS = (  # in the order of kernels/reference_divergences.py
    *("lse", "teacher_lse", "student_kl", "mixture_kl", "lower_mass"),
    *("hard_lse", "lse_of_all", "low", "teacher_low", "hard_low", "low_of_all"),
)
_TOPS = ("top", "top_class", "teacher_top", "teacher_top_class")


class TeacherHead(NamedTuple):
    teacher_input: Tensor  # (..., H')
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    classes: Tensor | None = None  # (V,): the teacher's class of each of the student's; None: they are the same


class Rows(NamedTuple):
    """What all ranks know of the rows, with the same bits on each."""

    values: Tensor  # (5, n)
    statistics: Tensor  # (11, n)
    tops: Tensor  # (2, n), or (0,) if they are not wanted


def statistics_by_name(statistics: Tensor) -> dict[str, Tensor]:
    return dict(zip(_STATISTICS, statistics.unbind(), strict=True))


def _sent(spec: Divergences, with_tops: bool, with_classes: bool) -> list[str]:
    """The numbers of a row that a slice packs."""
    names = ["lse", "teacher_lse", "low", "teacher_low"]
    names += [name for name in ("kl", "reverse_kl", "log_prob") if spec.reads(name)]
    names += ["hard_lse", "hard_low"] if spec.other_lse() else []
    names += ["lse_of_all", "low_of_all"] if with_classes else []
    return [*names, *(_TOPS if with_tops else ()), *(("covers_top",) if with_tops and with_classes else ())]


def slice_statistics(
    logits: Tensor,
    teacher: TeacherRows,
    target: Tensor,
    class_start: int,
    with_tops: bool,
    spec: Divergences,
    classes: Tensor | None = None,
) -> Tensor:
    """(1, width)."""
    row_args, width = (logits, teacher.logits, target, None, None, class_start), logits.shape[1]
    values, statistics = _ops.divergences_forward(*row_args, **spec.keywords())
    number = values.new_full((), teacher.all_logits.shape[1])
    of = statistics_by_name(statistics) | dict(zip(FIELDS, values.unbind(), strict=True))
    if teacher.lse is not None:
        of["lse_of_all"], of["low_of_all"] = teacher.lse
    if spec.reads("log_prob"):
        options, place = spec.options, (width, class_start, spec.num_classes)
        at = columns_of_ids(target.unsqueeze(-1), *place, options.ignore_index)
        of["log_prob"] = gather(logits, at, options).squeeze(-1)
    if with_tops:
        assert teacher.top is not None
        top, top_class, covers = top_classes(logits, teacher, target, classes, spec._replace(num_classes=None))
        of["top"], of["top_class"] = _at(top, logits, target, spec.student()), top_class
        of["teacher_top"] = _at(teacher.top, teacher.all_logits, target, spec.teacher())
        of["teacher_top_class"], of["covers_top"] = teacher.top, covers
    if classes is not None:
        number = number * nan_unless_different(classes, teacher.all_logits.shape[1])
    sent = _sent(spec, with_tops, classes is not None)
    numbers = [of[name].to(values.dtype) for name in sent]
    return torch.cat([*numbers, header(class_start, width, number)]).unsqueeze(0)


def _at(column: Tensor, logits: Tensor, target: Tensor, options: RowOptions) -> Tensor:
    """x of these columns; ignored rows are not read. Without columns: -inf."""
    if logits.shape[1] == 0:
        return target.new_full(target.shape, _NO_SHARE, dtype=torch.float64)
    index = torch.where(is_counted(target, options.ignore_index), column, -100).unsqueeze(-1)
    options = options._replace(ignore_index=-100)
    return gather(logits, columns_of_ids(index, logits.shape[1], 0, None, -100), options).squeeze(-1)


def join(
    gathered: Tensor,
    target: Tensor,
    spec: Divergences,
    with_tops: bool,
    with_classes: bool = False,
) -> Rows:
    """The rows of all classes. The values of a second visit are still 0."""
    assert spec.num_classes is not None
    starts, sizes = shard_ranges(gathered[:, -HEADER:])
    teacher_sizes, names = gathered[:, -1], _sent(spec, with_tops, with_classes)  # NaN: of classes that do not fit
    tiled = tiles(starts, sizes, spec.num_classes) & ~teacher_sizes.isnan().any()
    numbers = gathered[:, :-HEADER].view(gathered.shape[0], len(names), target.shape[0])
    of = dict(zip(names, numbers.unbind(1), strict=True))
    (lse, low), log_s = _join_lse(of["lse"], of["low"])
    (teacher_lse, teacher_low), log_t = _join_lse(of["teacher_lse"], of["teacher_low"])
    zero = torch.zeros_like(lse)
    values, hard_lse, hard_low = dict.fromkeys(FIELDS, zero), lse, low
    if "hard_lse" in of:
        (hard_lse, hard_low), _ = _join_lse(of["hard_lse"], of["hard_low"])
    if "kl" in of:
        values["kl"] = _chained(log_t, log_s, of["kl"])
    if "reverse_kl" in of:
        values["reverse_kl"] = _chained(log_s, log_t, of["reverse_kl"])
    if "log_prob" in of:
        values["log_prob"] = (of["log_prob"].sum(0) - hard_lse) - hard_low
    lse = torch.where(tiled, lse, float("nan"))
    packed = torch.where(tiled, torch.stack([values[name] for name in FIELDS]), float("nan"))
    lse_of_all, low_of_all = teacher_lse, teacher_low
    if with_classes:
        (lse_of_all, low_of_all), _ = _join_lse(of["lse_of_all"], of["low_of_all"])
    found = {"lse": lse, "teacher_lse": teacher_lse, "student_kl": values["reverse_kl"], "hard_lse": hard_lse}
    found |= {"low": low, "teacher_low": teacher_low, "hard_low": hard_low}
    found |= {"lse_of_all": lse_of_all, "low_of_all": low_of_all}
    statistics = torch.stack([found.get(name, zero) for name in _STATISTICS])
    found_tops = gathered.new_empty(0)
    if with_tops:
        order = starts * len(starts) + torch.arange(len(starts), device=starts.device)  # empty slices too have a place
        first = torch.where(order < order.unsqueeze(1), teacher_sizes, 0.0).sum(1, keepdim=True)
        top, teacher_top = (_first_top(of[name], of[f"{name}_class"] + first) for name in ("top", "teacher_top"))
        covers = torch.ones_like(lse)
        if with_classes:
            covers = torch.where(of["teacher_top_class"] + first == teacher_top, of["covers_top"], 0.0).sum(0)
        found_tops = torch.stack([(top == teacher_top).to(lse.dtype), covers])
    return Rows(torch.where(is_counted(target, spec.options.ignore_index), packed, 0.0), statistics, found_tops)


def _join_lse(lse: Tensor, low: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((lse, lse_low) (n,), the logarithms of the slices' shares (ranks, n)) from those of slices, (ranks, n)."""
    pivot = lse.amax(0)
    pivot = torch.where(pivot == _NO_SHARE, 0.0, pivot)
    distance = (lse - pivot) + low
    log_total = distance.logsumexp(0)
    return split_lse(pivot, log_total), distance - log_total


def _first_top(largest: Tensor, at_class: Tensor) -> Tensor:
    """(n,): the first class with the largest x of all slices, (ranks, n)."""
    return torch.where(largest == largest.amax(0), at_class, float("inf")).amin(0)


def _chained(log_p: Tensor, log_q: Tensor, slice_kl: Tensor) -> Tensor:
    """KL(p || q) from the slices' shares and the KL within each slice. The KL of a slice without share is not read."""
    p = log_p.exp()
    slice_kl = torch.where((log_p == _NO_SHARE) | (log_q == _NO_SHARE), 0.0, slice_kl)
    return torch.where(p == 0.0, 0.0, p * (slice_kl + log_p - log_q)).sum(0)


def second_sums(
    logits: Tensor, teacher_logits: Tensor, target: Tensor, rows: Rows, class_start: int, spec: Divergences
) -> Tensor | None:
    """(1, 4 n): this slice's parts of the sums that need the lse's of all classes. None: there are no such sums."""
    if not spec.visits_again():
        return None
    slice_args = (logits, teacher_logits, target, None, rows.statistics, class_start)
    values, statistics = _ops.divergences_forward(*slice_args, **spec.keywords())
    of, sums = dict(zip(FIELDS, values.unbind(), strict=True)), statistics_by_name(statistics)
    parts = [(of[name], sums[statistic]) for name, statistic in _AGAIN.items() if spec.reads(name)]
    return torch.cat([number for part in parts for number in part]).unsqueeze(0)


def add_second_sums(rows: Rows, gathered: Tensor, spec: Divergences) -> Rows:
    """Add the sums of all ranks, (ranks, 4 n)."""
    names = [name for name in _AGAIN if spec.reads(name)]
    sums = iter(gathered.view(gathered.shape[0], 2 * len(names), rows.values.shape[1]).sum(0).unbind())
    values = dict(zip(FIELDS, rows.values.unbind(), strict=True))
    statistics = statistics_by_name(rows.statistics)
    for name in names:
        values[name], statistics[_AGAIN[name]] = values[name] + next(sums), next(sums)
    return rows._replace(values=torch.stack([*values.values()]), statistics=torch.stack([*statistics.values()]))


Upstream = Callable[[Rows, RowRange], Tensor]  # to the gradients of the values, (5, n)


class DivergenceSteps:
    """The steps of loop.py on a chunk of two heads, with the caller's function between them."""

    def __init__(
        self,
        head: HeadSlice,
        teacher: TeacherHead,
        spec: Divergences,
        with_tops: bool,
        upstream: Upstream,
        ranks: OneRank,
        class_start: int | None,  # None: all classes
    ) -> None:
        self.class_start, self.logits_dtype = class_start, head.chunking.logits_dtype
        self.spec = spec if class_start is not None else spec._replace(num_classes=None)  # of the classes' columns
        place = (class_start or 0, spec.num_classes)
        bias = None if head.bias is None else head.bias.detach()
        self.weight, self.bias, _, _ = classes_of(head.weight.detach(), bias, None, *place)
        self.columns, self.classes = self.weight.shape[0], teacher.classes
        self.teacher = teacher.teacher_weight, teacher.teacher_bias
        if self.classes is None:
            self.teacher = classes_of(*self.teacher, None, *place)[:2]
        else:
            self.classes = self.classes[: self.columns]
        self.teacher_dtype = dtype_of_teacher(teacher.teacher_input.dtype, self.logits_dtype)
        self.with_tops, self.upstream, self.ranks = with_tops, upstream, ranks

    def begin(self, inputs: Sequence[Tensor], part: RowRange, after: Tensor | None) -> tuple[Any, ChunkLogits]:
        (input, teacher_input), counted, target = inputs, part.counted, part.target
        logits = _ops.linear_logits(input, self.weight, self.bias, counted, after, self.logits_dtype)
        teacher_logits = _ops.linear_logits(teacher_input, *self.teacher, counted, after, self.teacher_dtype)
        teacher_logits = first_columns(teacher_logits, self.teacher[0].shape[0])
        own, of_columns = first_columns(logits, self.columns), self.spec._replace(num_classes=None)
        given = teacher_rows(teacher_logits, target, self.classes, self.with_tops, of_columns)
        if self.class_start is not None:
            row_args = (own, given, target, self.class_start, self.with_tops, self.spec, self.classes)
            return slice_statistics(*row_args), (logits, given.logits)
        values, statistics = _ops.divergences_forward(own, given.logits, target, given.lse, **self.spec.keywords())
        of_tops = tops(own, given, target, self.classes, self.spec) if self.with_tops else values.new_empty(0)
        return Rows(values, statistics, of_tops), (logits, given.logits)

    def end(
        self,
        chunk_logits: ChunkLogits,
        part: RowRange,
        gathered: Any,
        output_mask: Sequence[bool],
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        (logits, teacher), rows, target = chunk_logits, gathered, part.target
        own = first_columns(logits, self.columns)
        if self.class_start is not None:
            rows = join(gathered, target, self.spec, self.with_tops, self.classes is not None)
            sums = second_sums(own, teacher, target, rows, self.class_start, self.spec)
            if sums is not None:
                rows = add_second_sums(rows, self.ranks.wait(self.ranks.gather(sums)), self.spec)
        grad_values = self.upstream(rows, part)
        if not any(output_mask):
            return None
        dtype = None if logits.dtype == self.weight.dtype else self.weight.dtype
        row_args = (own, teacher, target, rows.statistics, self.class_start, dtype)
        _ops.divergences_backward_(grad_values, *row_args, **self.spec.keywords())
        return _ops.linear_grad_input(logits, self.weight, output_mask[0], part.counted, after)
