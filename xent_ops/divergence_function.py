"""Losses of tokens' divergences between two heads: a user's function of them, and one of them with fixed factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .head.divergence_chunk import DivergenceSteps, Rows, TeacherHead, statistics_by_name
from .head.divergences import nan_unless_different, teacher_rows, tops
from .head.float16 import Split
from .head.loop import HeadSlice, OneRank, RowRange, Steps
from .kernels.divergences import FIELDS, Divergences, FixedLoss
from .kernels.options import LossOptions
from .kernels.reductions import counted_weights, times
from .kernels.reference import is_counted
from .linear_call import LinearCall, bind
from .ops import arguments, checks, distillation_arguments, distillation_checks, transforms
from .ops.dtensors import only_plain_tensors
from .ops.formulas import differentiable
from .ops.library import check_call_of
from .ops.linear import composite
from .outputs import TokenDivergences
from .token_probe import FieldRecorder
from .user_function import Function, TokenRows, UserFunction, Values

_NAMES = TokenDivergences._fields[: len(FIELDS)]  # of the values, in their order
_TOPS = ("agrees", "covers_top")


class TwoHeads(NamedTuple):
    """The arguments of a student and its teacher. distributed/consistency.py compares all fields between ranks."""

    student: LinearCall
    teacher: TeacherHead
    spec: Divergences

    def operator_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(tensors of an operator of two heads, options of its chunks)."""
        student, head, teacher = self.student, self.student.head, self.teacher
        tensors = (student.input, head.weight, student.target, teacher.teacher_input, teacher.teacher_weight)
        names = ("chunk_rows", "skip_ignored", "logits_dtype")
        keywords = {"accumulate_dtype": head.accumulate_dtype} | {name: getattr(head.chunking, name) for name in names}
        return (*tensors, head.bias, teacher.teacher_bias), keywords


def bind_heads(
    name: str,
    student: tuple[Any, Any, Any],  # input, weight, bias
    teacher: tuple[Any, Any, Any],
    target: Any,
    classes: Any,
    raw_options: tuple[Any, ...],  # the arguments of distillation_arguments.spec
    raw_chunking: tuple[Any, Any, Any, Any],  # accumulate_dtype, chunk_rows, skip_ignored, logits_dtype
    parts: int = 1,  # ranks that have a part of the inputs each
    *,
    reduction: Any = "none",
    divisor: Any = None,
    token_weight: Any = None,
    row_tensors: Any = (),  # with all rows
    hard_weight: Any = 0.0,
) -> TwoHeads:
    """Refuse values that are wrong on any device, for a loss that compares two heads."""
    only_plain_tensors(name, *student, *teacher, target, classes, divisor, token_weight)
    ignore_index, *options = raw_options
    target_args = (target, ignore_index, hard_weight, student[0], parts, row_tensors, reduction)
    target, ignore_index = distillation_arguments.target_of(*target_args)
    head_options = (ignore_index, 0.0, None, 1.0, 0.0, reduction)
    call = bind(
        *student[:2], target, student[2], None, head_options, raw_chunking, divisor, token_weight, two_models=True
    )
    checks.token_weight(token_weight, target)
    names = ("teacher_input", "teacher_weight", "teacher_bias")
    for one, tensor in zip(names[:2], teacher, strict=False):
        arguments.required(one, tensor)
    arguments.optional(names[2], teacher[2])
    for one, tensor in zip(names, teacher, strict=True):
        checks.constant(one, tensor)
    given = TeacherHead(*composite.cast_for_autocast(*teacher))._replace(classes=_bind_classes(classes))
    return TwoHeads(call, given, distillation_arguments.spec(ignore_index, *options))


class TwoLogits(NamedTuple):
    input: Tensor
    teacher_input: Tensor
    target: Tensor
    classes: Tensor | None
    spec: Divergences


def bind_logits(
    name: str, input: Any, teacher_input: Any, target: Any, classes: Any, raw_options: tuple[Any, ...], *others: Any
) -> TwoLogits:
    """The same of two models' logits. Refuses what ``logits_statistics`` would."""
    only_plain_tensors(name, input, teacher_input, target, classes, *others)
    ignore_index, *options = raw_options
    target, ignore_index = distillation_arguments.target_of(target, ignore_index, 0.0, input)
    arguments.tensors(input, target)
    arguments.required("teacher_input", teacher_input)
    checks.constant("teacher_input", teacher_input)
    spec = distillation_arguments.spec(ignore_index, *options)
    classes, teacher_logits = _bind_classes(classes), teacher_input
    if classes is not None:
        if spec.num_classes is not None:
            raise ValueError(distillation_checks.CLASSES_ALONE)
        checks.same_device("classes", classes, input)
        meaning = "the teacher's class of each of the student's"
        meaning += distillation_checks.mask_hint(classes, teacher_input.shape[-1])
        checks.same_shape("classes", classes.shape, input.shape[-1:], meaning)
        if transforms.can_read(classes):
            distillation_checks.class_values(classes, teacher_input.shape[-1])
        teacher_logits = teacher_input.new_empty(()).expand(*teacher_input.shape[:-1], *classes.shape)
    check_call_of("divergences_forward", input, teacher_logits, target, **spec.keywords())
    return TwoLogits(input, teacher_input, target, classes, spec)


def _bind_classes(classes: Any) -> Tensor | None:
    arguments.optional("classes", classes)
    if classes is not None:
        distillation_checks.are_ids(classes)
    return classes


class _Recorder(FieldRecorder):
    record, learned = TokenDivergences, _NAMES


class DivergenceRows(TokenRows):
    """A loss of the divergences of tokens. ``class_start``: of a rank's slices of both heads."""

    spec: Divergences
    teacher: TeacherHead | None = None  # None: of logits
    class_start: int | None = None
    with_tops = False

    def inputs(self, input: Tensor) -> tuple[Tensor, ...]:
        assert self.teacher is not None
        return input, self.teacher.teacher_input

    def steps(self, head: HeadSlice, loss: LossOptions, upstream: Any, ranks: OneRank) -> Steps:
        assert self.teacher is not None
        return DivergenceSteps(head, self.teacher, self.spec, self.with_tops, upstream, ranks, self.class_start)


class FieldRows(DivergenceRows):
    """Rows of which ``read`` are fields of TokenDivergences."""

    def bind_fields(self, spec: Divergences, teacher: TeacherHead | None, class_start: int | None) -> None:
        """``spec`` gets those of ``read``."""
        self._read_values = [i for i, name in enumerate(_NAMES) if name in self.read]
        self.spec = spec._replace(fields=",".join([FIELDS[i] for i in self._read_values] or FIELDS[:1]))
        self.teacher, self.class_start = teacher, class_start
        self.with_tops = any([name in self.read for name in _TOPS])

    def statistics(self, call: LinearCall) -> tuple[Tensor, ...]:
        assert self.teacher is not None
        heads, chunking = TwoHeads(call, self.teacher, self.spec).operator_arguments()
        more = (self.teacher.classes, self.with_tops)
        return differentiable("linear_divergences_forward", *heads, *more, **chunking, **self.spec.keywords())

    def _fields(self, read_values: Sequence[Tensor], of: Rows, target: Tensor) -> dict[str, Tensor]:
        """Those of ``read``, 0 in ignored rows: values are so already."""
        fields = dict(zip([_NAMES[i] for i in self._read_values], read_values, strict=True))
        constants = dict(zip(_TOPS, of.tops.unbind(), strict=True)) if self.with_tops else {}
        if "coverage" in self.read:
            rows = statistics_by_name(of.statistics)
            distance = (rows["teacher_lse"] - rows["lse_of_all"]) + (rows["teacher_low"] - rows["low_of_all"])
            constants["coverage"] = distance.exp()
        counted = is_counted(target, self.ignore_index)
        return fields | {name: torch.where(counted, constant, 0.0) for name, constant in constants.items()}

    def all_stats(
        self, values: Tensor, statistics: Tensor, tops: Tensor, target: Tensor
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        target = target.reshape(-1)
        values, statistics = (rows.reshape(rows.shape[0], self.number) for rows in (values, statistics))
        tops = tops.reshape(2, self.number) if self.with_tops else tops
        # Ignored rows get no gradient, even if a derivative is NaN.
        values = torch.where(is_counted(target, self.ignore_index), values, values.detach())
        read_values = [values[i] for i in self._read_values]
        return self._fields(read_values, Rows(values, statistics, tops), target), self._rows(self.number)


def logits_statistics(rows: FieldRows, logits: TwoLogits) -> tuple[Tensor, Tensor, Tensor]:
    """(values, statistics, tops) of both logits, as ``FieldRows.statistics`` of heads."""
    (input, teacher_input, target, classes, _), spec = logits, rows.spec
    if classes is not None and spec.reads("log_prob") and transforms.can_read(target):
        checks.index_values(target, None, classes, input.shape[-1], spec.options.ignore_index)
    if input.dtype == torch.float64:  # the lse of all of the teacher's classes has the accumulator of its logits
        teacher_input = teacher_input.to(input.dtype)
    teacher = teacher_rows(teacher_input, target, classes, rows.with_tops, spec)
    logit_args = (input, teacher.logits, target, teacher.lse)
    values, statistics = differentiable("divergences_forward", *logit_args, **spec.keywords())
    found = tops(input.detach(), teacher, target, classes, spec) if rows.with_tops else values.new_empty(0)
    return values, statistics, found


def factor_of_classes(classes: Tensor | None, number: int) -> Tensor | None:
    """1 if the classes are different, else NaN, where that cannot raise an error; else None."""
    return None if classes is None or transforms.can_read(classes) else nan_unless_different(classes, number)


class TokenFields(FieldRows):
    """The divergences of tokens themselves, for a caller that differentiates them."""

    def __init__(
        self,
        read: tuple[str, ...],
        target: Tensor,
        dtype: torch.dtype,
        spec: Divergences,
        teacher: TeacherHead | None = None,
        class_start: int | None = None,
    ) -> None:
        super().__init__([], target, spec.options.ignore_index, dtype, None)
        self.read = read
        self.bind_fields(spec, teacher, class_start)

    def divergences(self, of_rows: Any, target: Tensor, factor: Tensor | None = None) -> TokenDivergences:
        """Of the target's shape, from values, statistics and tops. Fields that are not read are None."""
        values, statistics, tops = of_rows
        fields, _ = self.all_stats(values, statistics, tops, target)
        if factor is not None:
            fields = {name: field * factor.to(field.dtype) for name, field in fields.items()}
        names = TokenDivergences._fields
        found: list[Any] = [fields[name].view(target.shape) if name in self.read else None for name in names]
        return TokenDivergences(*found)


class DivergenceFunction(FieldRows, UserFunction):
    """A user's function of TokenDivergences. ``spec`` gets the fields that it reads."""

    recorder = _Recorder
    instead = "xent_ops.linear_token_divergences (token_divergences of logits), differentiable, takes any function"

    def __init__(
        self,
        fn: Function,
        rows: Any,
        target: Tensor,
        has_target: bool,
        dtype: torch.dtype,
        learned: Sequence[Tensor | None],
        spec: Divergences,
        teacher: TeacherHead | None = None,
        class_start: int | None = None,
    ) -> None:
        super().__init__(fn, rows, target, spec.options.ignore_index, dtype, learned=learned)
        if "log_prob" in self.read and not has_target:
            raise ValueError("fn reads log_prob, the log-probability of the target: pass target=")
        self.bind_fields(spec, teacher, class_start)

    def upstream_of_parts(self, parts: int, split: Split, values: Values) -> Callable[[Rows, RowRange], Tensor]:
        all_rows = self._rows(parts, self.number // parts)

        def upstream(of: Rows, part: RowRange) -> Tensor:
            rows = [part.of(row) for row in all_rows]

            def token_values(*read_values: Tensor) -> Tensor:
                return self._call(self._fields(read_values, of, part.target), rows, part.target)

            read_values = [of.values[i] for i in self._read_values]
            value, derivatives = self.value_and_derivatives(token_values, read_values, split)
            values.append((value, part.target))
            grads = [torch.zeros_like(value)] * len(FIELDS)
            for i, derivative in zip(self._read_values, derivatives, strict=True):
                grads[i] = grads[i] if derivative is None else derivative
            return torch.stack(grads)  # the row operators leave out those of ignored rows, which may be NaN

        return upstream


class FixedDivergences(DivergenceRows):
    """A fixed loss of the tokens, times their weights. Its row is the weights, if there are any."""

    def __init__(
        self,
        fixed: FixedLoss,
        token_weight: Tensor | None,
        target: Tensor,
        dtype: torch.dtype,
        teacher: TeacherHead,
        class_start: int,
    ) -> None:
        ignore_index = fixed.spec.options.ignore_index
        rows = [] if token_weight is None else [counted_weights(token_weight.detach(), target, ignore_index, dtype)]
        super().__init__(rows, target, ignore_index, dtype, None)
        self.fixed, self.spec, self.teacher, self.class_start = fixed, fixed.spec, teacher, class_start

    @property
    def token_weight(self) -> Tensor | None:  # type: ignore[override]
        return self.rows[0] if self.rows else None

    def upstream_of_parts(self, parts: int, split: Split, values: Values) -> Callable[[Rows, RowRange], Tensor]:
        weights, inverse = self._rows(parts, self.number // parts), split.divisors[0].reciprocal()
        factors = None if split.token_weight is None else (inverse * split.token_weight).reshape(parts, -1)

        def upstream(of: Rows, part: RowRange) -> Tensor:
            loss = self.fixed.of(of.values)
            values.append((times(loss, part.of(weights[0])) if weights else loss, part.target))
            return self.fixed.upstream((inverse if factors is None else part.of(factors)).expand(loss.shape))

        return upstream
