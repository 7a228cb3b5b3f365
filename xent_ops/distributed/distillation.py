"""Losses of two heads whose classes are split between ranks: see token_loss.py.

This is the loop of pipelined.py with two heads. One all-gather sends a chunk's statistics of both heads while the next
chunk's products run. The mixture and the overlap are known only after the join: a second all-gather sends two more
numbers a row for each, and the gradient waits for it. head/divergence_chunk.py has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..divergence_function import DivergenceFunction, FixedDivergences, TokenFields, TwoHeads
from ..head import float16, loop
from ..head.divergence_chunk import Rows, TeacherHead, Upstream
from ..head.loop import RowRange
from ..kernels.divergences import FIELDS, STATISTICS, Divergences
from ..kernels.reference import accumulator
from ..linear_call import LinearCall
from ..ops import arguments, checks, distillation_arguments, distillation_checks, transforms
from ..ops.library import OPERATORS
from ..outputs import TokenDivergences
from ..token_function import loss_by_chunks
from ..user_function import Function, TokenRows
from .bound import Shard, bind_over_ranks, bind_shard, check_values
from .groups import Ranks
from .parts import as_target, by_ranks
from .pipelined import Collectives, arrange

_HINT = (
    ". They are rows of the teacher's head: where a rank has the teacher's classes start to end - 1, classes[mine] - "
    "start, beside weight[mine] as linear_weight, with mine = (classes >= start) & (classes < end)"
)


class _Bound(NamedTuple):
    """consistency.py compares all of it."""

    heads: TwoHeads
    loss: Any


BindHeads = Callable[[int], TwoHeads]  # of the number of ranks that have a part of the inputs each


def fixed_loss(shard: Shard, bind_heads: BindHeads, hard_weight: Any) -> Tensor:
    def bind(ranks: Ranks) -> _Bound:
        heads = _bind(shard, bind_heads, ranks)
        fixed = distillation_arguments.fixed_loss(heads.spec, hard_weight)
        if fixed.hard_weight != 0.0:
            check_values(heads.student, shard)
        return _Bound(heads, fixed)

    ((call, teacher, _), fixed), ranks = bind_over_ranks("linear_distillation_loss", shard, bind)
    if call.loss.reduction == "none" and any(loop.wanted_gradients(call.input, call.head)):
        raise NotImplementedError(
            'linear_distillation_loss with a shard has no gradient for reduction="none", whose upstream gradients '
            "would be known only after the logits are gone: weigh the rows by token_weight"
        )
    dtype, start = accumulator(call.input), call.head.shard_range[0]
    value = _loss(call, FixedDivergences(fixed, call.token_weight, call.target, dtype, teacher, start), ranks)
    return as_target(value, call.sequence_dim) if call.loss.reduction == "none" else value


def token_loss(shard: Shard, bind_heads: BindHeads, fn: Function, rows: Any, has_target: bool, check: bool) -> Tensor:
    def bind(ranks: Ranks) -> _Bound:
        heads = _bind(shard, bind_heads, ranks)
        call, teacher, spec = heads
        checks.reduction(call.loss.reduction, ("mean", "sum"))
        if arguments.boolean("check", check):
            raise NotImplementedError(
                "check=True of fn is not supported with a shard; Shard(check=True) compares the arguments of all ranks"
            )
        learned, dtype = (call.input, call.head.weight, call.head.bias), accumulator(call.input)
        start = call.head.shard_range[0]
        function = DivergenceFunction(fn, rows, call.target, has_target, dtype, learned, spec, teacher, start)
        _check_values(shard, heads, "log_prob" in function.read)
        return _Bound(heads, function)

    ((call, _, _), function), ranks = bind_over_ranks("linear_distillation_token_loss", shard, bind)
    return _loss(call, function, ranks)


def token_divergences(shard: Shard, bind_heads: BindHeads, read: tuple[str, ...]) -> TokenDivergences:
    def bind(ranks: Ranks) -> _Bound:
        heads = _bind(shard, bind_heads, ranks)
        _check_values(shard, heads, "log_prob" in read)
        call, teacher, spec = heads
        start = call.head.shard_range[0]
        return _Bound(heads, TokenFields(read, call.target, accumulator(call.input), spec, teacher, start))

    ((call, _, _), rows), ranks = bind_over_ranks("linear_token_divergences", shard, bind)
    of_rows = _Values.apply(call.input, call.head.weight, call.head.bias, call, rows, ranks)
    return rows.divergences(of_rows, call.target)


class _Values(torch.autograd.Function):
    """(values, statistics, tops) of all rows. The backward runs the loop again."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: LinearCall,
        rows: TokenFields,
        ranks: Ranks,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(input, weight, bias)
        ctx.options = call, rows, ranks
        split, found = call.sequence_dim, []
        parts = 1 if split is None else ranks.world

        def collect(of: Rows, part: RowRange) -> Tensor:
            found.append([row.view(parts, -1) for some in of for row in some.unbind()])
            return of.values  # not read: no gradient is wanted

        _run_loop(call, rows, ranks, collect, (False, False, False))
        shape = by_ranks(call.target, split, ranks).shape
        all_rows = [as_target(torch.cat(row, -1).view(shape), split) for row in zip(*found, strict=True)]
        ends = len(FIELDS), len(FIELDS) + STATISTICS
        values, statistics = torch.stack(all_rows[: ends[0]]), torch.stack(all_rows[ends[0] : ends[1]])
        tops = torch.stack(all_rows[ends[1] :]) if rows.with_tops else values.new_empty(0)
        ctx.mark_non_differentiable(statistics, tops)
        return values, statistics, tops

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_values: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (call, rows, ranks), (input, weight, bias) = ctx.options, ctx.saved_tensors
        call = call._replace(input=input, head=call.head._replace(weight=weight, bias=bias))
        split, mask = call.sequence_dim, ctx.needs_input_grad[:3]
        parts, rank = (1, 0) if split is None else (ranks.world, ranks.rank)
        target = by_ranks(call.target, split, ranks).reshape(-1)
        grads = torch.stack([by_ranks(grad, split, ranks).reshape(-1) for grad in grad_values.unbind()], -1)
        factors, divided = float16.split_grads(input.dtype, [grads, None, None], target, rows.spec.options)
        shares = None if factors is None else factors.shares.view(parts, -1)
        of_parts = (grads if divided[0] is None else divided[0]).view(parts, -1, len(FIELDS))

        def upstream(_: Rows, part: RowRange) -> Tensor:
            return part.of(of_parts).t().contiguous()

        gradients = _run_loop(call, rows, ranks, upstream, mask, shares)
        found = [one if wanted else None for one, wanted in zip(gradients, mask, strict=True)]
        if factors is not None:
            scales = factors.rows.view(parts, *input.shape[:-1], 1)[rank], factors.largest, factors.largest
            found = [one if one is None else one * scale for one, scale in zip(found, scales, strict=True)]
        return *[one if one is None else one.to(input.dtype) for one in found], None, None, None


def _run_loop(
    call: LinearCall, rows: TokenFields, ranks: Ranks, upstream: Upstream, mask: Sequence[bool], shares: Any = None
) -> loop.HeadGradients:
    target, collectives = by_ranks(call.target, call.sequence_dim, ranks), Collectives(ranks)
    steps = rows.steps(call.head, call.loss, upstream, collectives)
    loop_args = (rows.inputs(call.input), target, call.head, collectives, mask, rows.ignore_index)
    return loop.run_loop(steps, *loop_args, shares=shares, scattered=call.sequence_dim is not None)


def _check_values(shard: Shard, heads: TwoHeads, reads_target: bool) -> None:
    call, classes = heads.student, heads.teacher.classes
    if reads_target:
        check_values(call, shard, classes)
    if classes is not None:
        mine, number = classes[: call.head.columns()], heads.teacher.teacher_weight.shape[0]
        if number == 0 and mine.shape[0] > 0:  # no row that a class could name
            raise ValueError(f"classes has {mine.shape[0]} ids but teacher_weight has no rows{_HINT}")
        if shard.check or transforms.can_read(classes):
            distillation_checks.class_values(mine, number, _HINT)


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
    contract = OPERATORS["linear_divergences_forward"].contract
    slices = contract.blank(**tensors, **teacher._asdict(), num_classes=spec.num_classes)
    slices.class_start = start  # a slice may be empty
    contract.check_tensors(slices)
    distillation_checks.options(spec, call.input, teacher.teacher_input)
    classes = teacher.teacher_weight if teacher.classes is None else teacher.classes
    names = ("linear_weight", "teacher_weight")
    distillation_checks.slices(spec, start, head.weight.shape[0], classes.shape[0], names)


def _loss(call: LinearCall, function: TokenRows, ranks: Ranks) -> Tensor:
    ordered = arrange(call, function, ranks)
    return loss_by_chunks(call.as_sum(), ordered, function, Collectives(ranks))
