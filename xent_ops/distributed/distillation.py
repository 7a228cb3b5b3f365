"""Distillation where each rank holds some rows of the student's head and of the teacher's head.

This is the loop of pipelined.py with two heads. One all-gather sends a chunk's statistics of both heads while the next
chunk's products run. With beta between 0 and 1 the mixture is known only after the join: a second all-gather sends two
more numbers a row, and the gradient waits for it. head/divergence_chunk.py has the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..divergence_function import FixedDivergences
from ..head import loop
from ..head.divergence_chunk import TeacherHead
from ..kernels.divergences import FixedLoss
from ..kernels.options import Reduction
from ..kernels.reference import accumulator
from ..linear_call import LinearCall
from ..ops import arguments, distillation_arguments
from ..token_function import loss_by_chunks
from . import consistency
from .bound import check_values
from .groups import Group, ranks_of
from .parts import as_target
from .pipelined import Collectives, arrange
from .two_heads import bind_two_heads


class _Bound(NamedTuple):
    """The bound arguments of a call. consistency.py compares all of them."""

    student: LinearCall
    teacher: TeacherHead
    fixed: FixedLoss


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
    the whole gradient of the student's input. A step takes four matrix multiplications of this rank's classes. It holds
    two chunks of logits of each model. 3 numbers a row are all-gathered, or 2 and then 2 more with beta between 0 and
    1. ``hard_weight`` adds 1, or 2 at a temperature other than one. The gradient of the input is all-reduced.

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
            ``xent_ops.linear_distillation_loss``, the same on every rank. target and token_weight hold all rows, also
            with ``sequence_parallel``.
        softcap, teacher_softcap, logit_scale, teacher_logit_scale: likewise.
        accumulate_dtype, chunk_rows, check: as for ``vocab_parallel_linear_cross_entropy``; the same on every rank.

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

    def bind_heads() -> _Bound:
        call, teacher, spec = bind_two_heads(
            f"xent_ops.distributed.{name}",
            ranks,
            (input, weight_shard, bias_shard),
            (teacher_input, teacher_weight_shard, teacher_bias_shard),
            target,
            hard_weight,
            (token_weight,),
            (num_classes, class_start, sequence_parallel),
            (ignore_index, softcap, logit_scale),
            (beta, temperature, teacher_softcap, teacher_logit_scale),
            (accumulate_dtype, chunk_rows, False),
            reduction,
            divisor,
            token_weight,
        )
        fixed = distillation_arguments.fixed_loss(spec, hard_weight)
        if check and fixed.hard_weight != 0.0:
            check_values(call)
        return _Bound(call, teacher, fixed)

    call, teacher, fixed = consistency.bound(name, group, ranks, bind_heads, check)
    if call.loss.reduction == "none" and any(loop.wanted_gradients(call.input, call.head)):
        raise NotImplementedError(
            f'xent_ops.distributed.{name} has no gradient for reduction="none", whose upstream gradients would be '
            "known only after the logits are gone: weigh the rows by token_weight"
        )
    dtype, start = accumulator(call.input), call.head.shard_range[0]
    function = FixedDivergences(fixed, call.token_weight, call.target, dtype, teacher, start)
    ordered = arrange(call, function, ranks)
    value = loss_by_chunks(call.as_sum(), ordered, function, Collectives(ranks))
    return as_target(value, call.sequence_dim) if reduction == "none" else value
