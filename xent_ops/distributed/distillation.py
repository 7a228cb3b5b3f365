"""Losses of two heads whose classes are split between ranks: see token_loss.py.

This is the loop of pipelined.py with two heads. One all-gather sends a chunk's statistics of both heads while the next
chunk's products run. The mixture and the overlap are known only after the join: a second all-gather sends two more
numbers a row for each, and the gradient waits for it. head/divergence_chunk.py has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..divergence_function import DivergenceFunction, FixedDivergences, TwoHeads
from ..head import loop
from ..head.divergence_chunk import TeacherHead
from ..kernels.divergences import Divergences, FixedLoss
from ..kernels.reference import accumulator
from ..linear_call import LinearCall
from ..ops import checks, distillation_arguments, distillation_checks, transforms
from ..ops.library import OPERATORS
from ..token_function import loss_by_chunks
from ..user_function import Function, TokenRows
from .bound import Shard, bind_shard, check_values, over_ranks
from .groups import Ranks
from .parts import as_target
from .pipelined import Collectives, arrange

_HINT = (
    ". They are rows of the teacher's head: where a rank has the teacher's classes start to end - 1, classes[mine] - "
    "start, beside weight[mine] as linear_weight, with mine = (classes >= start) & (classes < end)"
)


class _Fixed(NamedTuple):
    """consistency.py compares all of it."""

    heads: TwoHeads
    fixed: FixedLoss


class _Tokens(NamedTuple):
    """The same."""

    heads: TwoHeads
    function: DivergenceFunction


BindHeads = Callable[[int], TwoHeads]  # of the number of ranks that have a part of the inputs each


def fixed_loss(shard: Shard, bind_heads: BindHeads, hard_weight: Any) -> Tensor:
    def bind(ranks: Ranks) -> _Fixed:
        heads = _bind(shard, bind_heads, ranks)
        fixed = distillation_arguments.fixed_loss(heads.spec, hard_weight)
        if shard.check and fixed.hard_weight != 0.0:
            check_values(heads.student)
        return _Fixed(heads, fixed)

    ((call, teacher, _), fixed), ranks = over_ranks("linear_distillation_loss", shard, bind)
    if call.loss.reduction == "none" and any(loop.wanted_gradients(call.input, call.head)):
        raise NotImplementedError(
            'linear_distillation_loss with a shard has no gradient for reduction="none", whose upstream gradients '
            "would be known only after the logits are gone: weigh the rows by token_weight"
        )
    dtype, start = accumulator(call.input), call.head.shard_range[0]
    value = _loss(call, FixedDivergences(fixed, call.token_weight, call.target, dtype, teacher, start), ranks)
    return as_target(value, call.sequence_dim) if call.loss.reduction == "none" else value


def token_loss(shard: Shard, bind_heads: BindHeads, fn: Function, rows: Any, has_target: bool, check: bool) -> Tensor:
    def bind(ranks: Ranks) -> _Tokens:
        heads = _bind(shard, bind_heads, ranks)
        call, teacher, spec = heads
        if check:
            raise NotImplementedError(
                "check=True of fn is not supported with a shard; Shard(check=True) compares the arguments of all ranks"
            )
        learned, dtype = (call.input, call.head.weight, call.head.bias), accumulator(call.input)
        start, classes = call.head.shard_range[0], teacher.classes
        function = DivergenceFunction(fn, rows, call.target, has_target, dtype, learned, spec, teacher, start)
        if shard.check and function.spec.reads("log_prob"):
            check_values(call, classes)
        if classes is not None:
            mine, number = classes[: call.head.columns()], teacher.teacher_weight.shape[0]
            if number == 0 and mine.shape[0] > 0:  # no row that a class could name
                raise ValueError(f"classes has {mine.shape[0]} ids but teacher_weight has no rows{_HINT}")
            if shard.check or transforms.can_read(classes):
                distillation_checks.class_values(mine, number, _HINT)
        return _Tokens(heads, function)

    ((call, _, _), function), ranks = over_ranks("linear_distillation_token_loss", shard, bind)
    return _loss(call, function, ranks)


def _bind(shard: Shard, bind_heads: BindHeads, ranks: Ranks) -> TwoHeads:
    """All errors that this rank can detect, except for target values."""
    call, teacher, spec = bind_heads(ranks.world if shard.sequence_parallel else 1)
    if spec.num_classes is not None:
        raise ValueError(f"num_classes={spec.num_classes} beside a shard, which has num_classes too: leave it out")
    call = bind_shard(call, ranks, shard, by_chunks=True, reads_target=False)
    spec = spec._replace(num_classes=call.head.shard_range[1])
    if transforms.is_traced():  # the operators of chunks refuse the rest
        rows_of = (teacher.teacher_input.shape[:-1], call.input.shape[:-1])
        checks.same_shape("rows of teacher_input", *rows_of, "those of the input")
    else:
        _check_heads(call, teacher, spec)
    return TwoHeads(call, teacher, spec)


def _check_heads(call: LinearCall, teacher: TeacherHead, spec: Divergences) -> None:
    head, target, start = call.head, call.target, call.head.shard_range[0]
    if call.sequence_dim is not None:
        target = target.new_empty(()).expand(call.input.shape[:-1])
    tensors = {"input": call.input, "linear_weight": head.weight, "linear_bias": head.bias, "target": target}
    contract = OPERATORS["linear_divergences_chunk"].contract
    slices = contract.blank(**tensors, **teacher._asdict(), class_start=start, num_classes=spec.num_classes)
    contract.check_tensors(slices)
    distillation_checks.options(spec, call.input, teacher.teacher_input)
    classes = teacher.teacher_weight if teacher.classes is None else teacher.classes
    names = ("linear_weight", "teacher_weight")
    distillation_checks.slices(spec, start, head.weight.shape[0], classes.shape[0], names)


def _loss(call: LinearCall, function: TokenRows, ranks: Ranks) -> Tensor:
    ordered = arrange(call, function, ranks)
    return loss_by_chunks(call.as_sum(), ordered, function, Collectives(ranks))
