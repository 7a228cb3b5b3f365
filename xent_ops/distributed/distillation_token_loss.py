"""A user's function of each token's divergences where each rank holds some rows of both heads: see token_loss.py.

The collectives are those of distillation.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..divergence_function import DivergenceFunction
from ..head.divergence_chunk import TeacherHead
from ..kernels.divergences import Divergences
from ..kernels.options import TokenReduction
from ..kernels.reference import accumulator
from ..linear_call import LinearCall
from ..ops import arguments, checks, distillation_checks, transforms
from ..token_function import loss_by_chunks
from ..user_function import Function
from . import consistency
from .bound import check_values
from .groups import Group, ranks_of
from .pipelined import Collectives, arrange
from .two_heads import bind_two_heads

_HINT = (
    ". They are rows of teacher_weight_shard: where it has the teacher's classes start to end - 1, classes[mine] - "
    "start, beside weight_shard = weight[mine], with mine = (classes >= start) & (classes < end)"
)


class _Bound(NamedTuple):
    """consistency.py compares all of it."""

    student: LinearCall
    teacher: TeacherHead
    spec: Divergences
    function: DivergenceFunction


@arguments.named
def vocab_parallel_linear_distillation_token_loss(
    input: Tensor,
    weight_shard: Tensor,
    teacher_input: Tensor,
    teacher_weight_shard: Tensor,
    fn: Function,
    group: Group = None,
    *,
    num_classes: int,
    class_start: int | None = None,
    rows: tuple[Tensor, ...] = (),
    target: Tensor | None = None,
    classes: Tensor | None = None,
    bias_shard: Tensor | None = None,
    teacher_bias_shard: Tensor | None = None,
    sequence_parallel: bool = False,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: TokenReduction = "mean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    check: bool = False,
) -> Tensor:
    """``xent_ops.linear_distillation_token_loss`` of two heads whose rows (classes) are split between ranks.

    Every rank gets the same loss, bit for bit. Backward returns the gradient of its own rows of the student's head, and
    the whole gradient of the student's input. A step takes four matrix multiplications of this rank's classes, and
    holds two chunks of logits of each model. A row all-gathers two numbers, one for each of kl, reverse_kl and log_prob
    that fn reads, four for the argmaxes, and then two for each of jsd and overlap. ``classes`` adds one, and one for
    the argmaxes.

    Args:
        input, weight_shard, bias_shard, teacher_input, teacher_weight_shard, teacher_bias_shard: as for
            ``vocab_parallel_linear_distillation_loss``.
        group, num_classes, class_start, sequence_parallel: as for ``vocab_parallel_linear_distillation_loss``.
        fn, rows: as for ``xent_ops.linear_distillation_token_loss``, for all tokens, the same on every rank, also with
            ``sequence_parallel``.
        target: (...), class indices of the student's whole vocabulary, the same on every rank. None: all rows count.
        classes: (classes of this rank,), a draft vocabulary, as for ``xent_ops.linear_distillation_token_loss``: the
            row of ``teacher_weight_shard`` of each of the student's classes. So the student's head is split where the
            teacher's is. ``class_start`` and ``num_classes`` count the student's classes, and ``teacher_weight_shard``
            has no padding. On every rank or on none. Wrong values raise on their rank alone, with ``check`` on all
            ranks; on a GPU without it the loss is NaN.
        beta, temperature, softcap, logit_scale, teacher_softcap, teacher_logit_scale: as for
            ``xent_ops.linear_distillation_token_loss``, the same on every rank.
        reduction, divisor, ignore_index, logits_dtype, accumulate_dtype, chunk_rows: likewise.
        check: as for ``vocab_parallel_linear_cross_entropy``. It also compares the values of ``rows``.

    Returns:
        The loss, float32 (float64 for float64 input), (). In float16 the derivatives of fn must fit into float16.
        Errors are those of ``xent_ops.linear_distillation_token_loss`` and ``vocab_parallel_linear_cross_entropy``.
        Shards that do not tile the student's vocabulary give NaN on every rank.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> hidden, weight_shard = torch.randn(8, 16), torch.randn(1024 // world, 16, requires_grad=True)
        >>> teacher_hidden, teacher_shard = torch.randn(8, 32), torch.randn(1024 // world, 32)
        >>> total_variation = lambda d: 1 - d.overlap
        >>> function = xent_ops.distributed.vocab_parallel_linear_distillation_token_loss
        >>> function(hidden, weight_shard, teacher_hidden, teacher_shard, total_variation, num_classes=1024).backward()
    """
    name, ranks = "vocab_parallel_linear_distillation_token_loss", ranks_of(group)

    def bind_function() -> _Bound:
        call, teacher, spec = bind_two_heads(
            f"xent_ops.distributed.{name}",
            ranks,
            (input, weight_shard, bias_shard),
            (teacher_input, teacher_weight_shard, teacher_bias_shard),
            target,
            0.0,
            rows if isinstance(rows, (tuple, list)) else (),
            (num_classes, class_start, sequence_parallel),
            (ignore_index, softcap, logit_scale),
            (beta, temperature, teacher_softcap, teacher_logit_scale),
            (accumulate_dtype, chunk_rows, False, logits_dtype),
            reduction,
            divisor,
            classes=classes,
        )
        checks.reduction(reduction, ("mean", "sum"))
        learned, dtype = (call.input, call.head.weight, call.head.bias), accumulator(call.input)
        start, has_target = call.head.shard_range[0], target is not None
        function = DivergenceFunction(fn, rows, call.target, has_target, dtype, learned, spec, teacher, start)
        if check and function.spec.reads("log_prob"):
            check_values(call, classes)
        if classes is not None:
            mine, number = classes[: call.head.columns()], teacher.teacher_weight.shape[0]
            if number == 0 and mine.shape[0] > 0:  # no row that a class could name
                raise ValueError(f"classes has {mine.shape[0]} ids but teacher_weight_shard has no rows{_HINT}")
            if check or transforms.can_read(classes):
                distillation_checks.class_values(mine, number, _HINT)
        return _Bound(call, teacher, spec, function)

    call, _, _, function = consistency.bound(name, group, ranks, bind_function, check)
    ordered = arrange(call, function, ranks)
    return loss_by_chunks(call.as_sum(), ordered, function, Collectives(ranks))
