"""Distillation where each rank holds some rows of the student's head and of the teacher's head.

This is the loop of pipelined.py with two heads. One all-gather sends a chunk's statistics of both heads while the next
chunk's products run. With beta between 0 and 1 the mixture is known only after the join: a second all-gather sends two
more numbers a row, and the gradient waits for it. head/distillation_shard.py has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..head import distillation_shard, float16, loop
from ..head.loop import ChunkLogits, HeadSlice, RowRange
from ..kernels import reductions
from ..kernels.distillation import Distillation
from ..kernels.options import Reduction
from ..kernels.reference import accumulator
from ..linear_call import LinearCall, bind
from ..ops import arguments, checks, distillation_arguments, distillation_checks, transforms
from ..ops.dtensors import refuse_dtensors
from ..ops.linear import checks as linear_checks
from ..ops.linear import composite
from ..ops.reduction import divisors_of
from . import consistency
from .bound import NAMES, as_target, bind_shard, by_ranks, check_values
from .groups import Group, Ranks, ranks_of
from .pipelined import Collectives

_ops = torch.ops.xent
_TEACHER = ("teacher_weight_shard", "teacher_bias_shard")


class _Teacher(NamedTuple):
    teacher_input: Tensor  # (..., H') of this rank
    teacher_weight: Tensor
    teacher_bias: Tensor | None


class _Bound(NamedTuple):
    """The bound arguments of a call. consistency.py compares all of them."""

    student: LinearCall
    teacher: _Teacher
    spec: Distillation


@arguments.named
def vocab_parallel_linear_distillation_loss(
    input: Tensor,
    weight_shard: Tensor,
    teacher_input: Tensor,
    teacher_weight_shard: Tensor,
    group: Group = None,
    *,
    num_classes: int,
    class_start: int | None = None,
    target: Tensor | None = None,
    bias_shard: Tensor | None = None,
    teacher_bias_shard: Tensor | None = None,
    sequence_parallel: bool = False,
    beta: float = 0.0,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    reduction: Reduction = "mean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    check: bool = False,
) -> Tensor:
    """``xent_ops.linear_distillation_loss`` of two heads whose rows (classes) are split between the ranks of a group.

    Every rank gets the same loss, bit for bit. Backward returns the gradient of its own rows of the student's head, and
    the whole gradient of the student's input. A step takes four products of this rank's classes. It holds two chunks of
    logits of each model. 3 numbers a row are all-gathered, or 2 and then 2 more with beta between 0 and 1.
    ``hard_weight`` adds 1, or 2 at a temperature other than one. The gradient of the input is all-reduced.

    Args:
        input, weight_shard, bias_shard: the student's, as for ``vocab_parallel_linear_cross_entropy``.
        teacher_input, teacher_weight_shard, teacher_bias_shard: (..., H'), (classes of this rank, H') and (classes of
            this rank,). The teacher's head is split at the same classes. All three are constants, as for
            ``xent_ops.linear_distillation_loss``. The input is the same on every rank.
        group, num_classes, class_start: as for ``vocab_parallel_linear_cross_entropy``, for both heads. Each may
            have any number of padding rows after ``num_classes``.
        target: (...), class indices of the whole vocabulary, the same on every rank. They tell which rows are
            ignored, and hard_weight's cross entropy uses them. None: all rows count.
        sequence_parallel: as for ``vocab_parallel_linear_cross_entropy``, for both inputs. They are this rank's part of
            the same rows. Both are gathered, chunk by chunk. The gradient of the student's input is reduce-scattered.
        beta, temperature, hard_weight, reduction, divisor, ignore_index, token_weight: as for
            ``xent_ops.linear_distillation_loss``, the same on every rank. target and token_weight hold all rows,
            also with ``sequence_parallel``.
        softcap, teacher_softcap, logit_scale, teacher_logit_scale: as for ``beta``.
        accumulate_dtype, chunk_rows: as for ``xent_ops.linear_cross_entropy``, for this rank's products; the same on
            every rank.
        check: as for ``vocab_parallel_linear_cross_entropy``.

    Returns:
        The loss, float32 (float64 for float64 input): (), or with "none" the shape of all rows, without gradients.

    Errors are those of ``xent_ops.linear_distillation_loss`` and ``vocab_parallel_linear_cross_entropy``. Shards that
    do not tile the vocabulary give NaN on every rank.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> hidden, weight_shard = torch.randn(8, 16), torch.randn(1024 // world, 16, requires_grad=True)
        >>> teacher_hidden, teacher_shard = torch.randn(8, 32), torch.randn(1024 // world, 32)
        >>> function = xent_ops.distributed.vocab_parallel_linear_distillation_loss
        >>> function(hidden, weight_shard, teacher_hidden, teacher_shard, num_classes=1024, beta=0.5).backward()
    """
    name, ranks = "vocab_parallel_linear_distillation_loss", ranks_of(group)
    arguments.boolean("check", check)
    teacher = (teacher_input, teacher_weight_shard, teacher_bias_shard)
    divergence_options = (beta, temperature, hard_weight, teacher_softcap, teacher_logit_scale)

    def bind_heads() -> _Bound:
        transforms.refuse(f"xent_ops.distributed.{name}")
        tensors = (input, weight_shard, bias_shard, *teacher, target, token_weight)
        refuse_dtensors(f"xent_ops.distributed.{name}", *[t for t in tensors if isinstance(t, Tensor)])
        world = ranks.world if sequence_parallel else 1
        rows = _rows(input, token_weight, world, reduction) if target is None else None
        classes, ignored = distillation_arguments.target_of(target, ignore_index, hard_weight, input, rows)
        raw_options = (ignored, 0.0, softcap, logit_scale, 0.0, reduction)
        student_args = (input, weight_shard, classes, bias_shard, None)
        raw_chunking = (accumulate_dtype, chunk_rows, False)
        student = bind(*student_args, raw_options, raw_chunking, divisor, token_weight, names=NAMES)
        student = bind_shard(student, ranks, None, num_classes, class_start, sequence_parallel)
        spec = distillation_arguments.spec(
            ignored, softcap, logit_scale, (student.head.shard_range[1], *divergence_options)
        )
        return _Bound(student, _bound_teacher(teacher, student, spec), spec)

    def bind_checked() -> _Bound:
        bound = bind_heads()
        if bound.spec.hard_weight != 0.0:
            check_values(bound.student)
        return bound

    return _loss(name, consistency.check(name, group, ranks, bind_checked) if check else bind_heads(), ranks)


def _rows(input: Any, token_weight: Any, world: int, reduction: Any) -> Sequence[int] | None:
    """The shape of all rows, for a call without a target. None for an input that a later check refuses."""
    if not isinstance(input, Tensor) or input.dim() == 0:
        return None
    shape = input.shape[:-1]
    if world == 1 or len(shape) == 0:
        return shape
    if isinstance(token_weight, Tensor):
        return token_weight.shape
    if reduction == "none":
        raise ValueError(
            "without a target nothing says along which dimension sequence_parallel=True splits the rows: pass one with "
            'reduction="none"'
        )
    return world * shape[0], *shape[1:]  # a sum does not depend on the order


def _bound_teacher(tensors: tuple[Any, Any, Any], student: LinearCall, spec: Distillation) -> _Teacher:
    for which, value in zip(("input", "weight_shard"), tensors, strict=False):
        arguments.required(f"teacher_{which}", value)
    arguments.optional("teacher_bias_shard", tensors[2])
    for which, tensor in zip(("input", "weight_shard", "bias_shard"), tensors, strict=True):
        distillation_checks.teacher_is_constant(f"teacher_{which}", tensor)
    teacher = _Teacher(*composite.cast_for_autocast(*tensors))
    if transforms.is_traced():  # the operators of chunks refuse the rest
        rows_of = (teacher.teacher_input.shape[:-1], student.input.shape[:-1])
        checks.same_shape("rows of teacher_input", *rows_of, "those of the input")
    else:
        head, rows = student.head, student.target
        if student.sequence_dim is not None:  # this rank's rows
            rows = rows.new_empty(()).expand(student.input.shape[:-1])
        student_head, class_start = (student.input, head.weight, head.bias), head.shard_range[0]
        linear_checks.two_heads(student_head, rows, teacher, spec, class_start, NAMES, _TEACHER)
    return teacher


class _Steps:
    """The steps of distillation on a chunk, for head/loop.py. ``losses`` holds the row losses of each chunk."""

    def __init__(
        self,
        student: HeadSlice,
        teacher: _Teacher,
        spec: Distillation,
        ranks: Collectives,
        factor: Callable[[RowRange], Tensor],
    ) -> None:
        self.weight, self.bias = student.weight.detach(), None if student.bias is None else student.bias.detach()
        self.teacher_weight, self.teacher_bias = teacher.teacher_weight, teacher.teacher_bias
        self.class_start, self.spec, self.ranks, self.factor = student.shard_range[0], spec, ranks, factor
        self.columns = student.columns()
        self.losses: list[Tensor] = []

    def begin(
        self, inputs: Sequence[Tensor], part: RowRange, count: Tensor | None, after: Tensor | None
    ) -> tuple[Tensor, ChunkLogits]:
        heads = (inputs[0], self.weight, part.target, inputs[1], self.teacher_weight)
        slice_args = (self.class_start, self.bias, self.teacher_bias, after)
        statistics, *logits = _ops.linear_distillation_chunk(*heads, *slice_args, **self.spec.keywords())
        return statistics, tuple(logits)

    def end(
        self,
        chunk_logits: ChunkLogits,
        part: RowRange,
        gathered: Tensor,
        output_mask: Sequence[bool],
        count: Tensor | None,
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        rows = distillation_shard.join_statistics(self.ranks.wait(gathered), part.target, self.spec)
        student, teacher = [logits[:, : self.columns] for logits in chunk_logits]
        sums = distillation_shard.mixture_sums(student, teacher, part.target, rows, self.class_start, self.spec)
        if sums is not None:
            gathered_sums = self.ranks.wait(self.ranks.gather(sums))
            rows = distillation_shard.add_mixture_sums(rows, gathered_sums, part.target, self.spec)
        self.losses.append(rows.loss)
        if not any(output_mask):
            return None
        logits, teacher_logits = chunk_logits
        backward_args = (teacher_logits, self.weight, part.target, rows.statistics, self.class_start, output_mask[0])
        return _ops.linear_distillation_chunk_grad_(
            logits, self.factor(part), *backward_args, after, **self.spec.keywords()
        )


def _loss(name: str, bound: _Bound, ranks: Ranks) -> Tensor:
    student, teacher, spec = bound
    target, input, head, loss, divisor, token_weight, *_ = student
    split = student.sequence_dim
    output_mask, dtype = loop.wanted_gradients(input, head), accumulator(input)
    if any(output_mask) and loss.reduction == "none":
        raise NotImplementedError(
            f'xent_ops.distributed.{name} has no gradient for reduction="none", whose upstream gradients would be '
            "known only after the logits are gone: weigh the rows by token_weight"
        )
    if any(output_mask) and divisor is not None and divisor.requires_grad:
        checks.divisor_needs_grad()
    ordered, parts = by_ranks(target, split, ranks), 1 if split is None else ranks.world
    weights = None if token_weight is None else by_ranks(token_weight.to(dtype), split, ranks)
    if loss.reduction == "none":
        divisors = target.new_ones(2, dtype=dtype)
        taken = float16.Split(divisors, weights)
    else:
        divisors = divisors_of(ordered, None, weights, divisor, loss, dtype)
        taken = float16.split_loss(input.dtype, divisors, ordered, weights, loss=loss)
    inverse = taken.divisors[0].reciprocal()
    factors, shares = (None if rows is None else rows.reshape(parts, -1) for rows in (taken.token_weight, taken.shares))
    factors = None if factors is None else inverse * factors
    steps = _Steps(
        head, teacher, spec, Collectives(ranks), lambda part: inverse if factors is None else part.of(factors)
    )
    inputs = (input, teacher.teacher_input)
    loop_args = (steps, inputs, ordered, head, steps.ranks, output_mask, spec.options.ignore_index)
    grads = loop.run_loop(*loop_args, scattered=split is not None, shares=shares)
    rows = torch.cat([values.view(parts, -1) for values in steps.losses], 1).view(ordered.shape)
    if loss.reduction == "none":
        return as_target(reductions.reduce_rows(rows, rows, ordered, None, loss, weights).value, split)
    mean = loss._replace(reduction="mean")
    value = reductions.reduce_rows(rows, rows, ordered, divisors, mean, weights).value
    part = None if split is None else ranks.rank
    return loop.value(value, input, head, grads, taken, part) if any(output_mask) else value
