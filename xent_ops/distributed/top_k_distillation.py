"""``top_k_distillation`` where each rank holds some rows of the student's head: the loop of pipelined.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.options import TokenReduction
from ..linear_call import LinearCall, bind
from ..ops import arguments, checks
from ..top_k_distillation import bind_loss, check_teacher
from . import consistency, token_loss
from .bound import NAMES, bind_shard
from .groups import Group, ranks_of


class _Bound(NamedTuple):
    """consistency.py compares all of it."""

    call: LinearCall
    probs: Tensor
    tail: bool


@arguments.named
def vocab_parallel_linear_top_k_distillation_loss(
    input: Tensor,
    weight_shard: Tensor,
    ids: Tensor,
    probs: Tensor,
    group: Group = None,
    *,
    num_classes: int,
    class_start: int | None = None,
    tail: bool = False,
    bias_shard: Tensor | None = None,
    sequence_parallel: bool = False,
    ignore_index: int = -100,
    reduction: TokenReduction = "mean",
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    divisor: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    logits_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    check: bool = False,
) -> Tensor:
    """``xent_ops.linear_top_k_distillation_loss`` of a head whose rows (classes) are split between ranks.

    Every rank gets the same loss, bit for bit. Backward returns the gradient of its own rows of the head, and the whole
    gradient of its input. A step takes three matrix multiplications, and holds two chunks of logits. K + 3 numbers a
    row are all-gathered.

    Args:
        input, weight_shard, bias_shard, group, num_classes, class_start, sequence_parallel: as for
            ``vocab_parallel_linear_cross_entropy``.
        ids, probs, tail, token_weight: as for ``xent_ops.linear_top_k_distillation_loss``, with classes of the whole
            vocabulary, for all rows, the same on every rank.
        reduction: "mean" or "sum".
        ignore_index, lse_square_scale, softcap, logit_scale, divisor, accumulate_dtype, chunk_rows, logits_dtype: as
            for ``xent_ops.linear_top_k_distillation_loss``.
        batch_invariant, check: as for ``vocab_parallel_linear_cross_entropy``.

    Returns:
        The loss, float32 (float64 for float64 input), (). Errors are those of
        ``xent_ops.linear_top_k_distillation_loss`` and ``vocab_parallel_linear_cross_entropy``.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> hidden, weight_shard = torch.randn(8, 16), torch.randn(1024 // world, 16, requires_grad=True)
        >>> probs, ids = torch.ones(8, 1024).softmax(-1).topk(4)
        >>> function = xent_ops.distributed.vocab_parallel_linear_top_k_distillation_loss
        >>> function(hidden, weight_shard, ids, probs, num_classes=1024, tail=True).backward()
    """
    name, ranks = "vocab_parallel_linear_top_k_distillation_loss", ranks_of(group)
    raw_options = (ignore_index, 0.0, softcap, logit_scale, lse_square_scale, reduction)
    raw_chunking = (accumulate_dtype, chunk_rows, False, logits_dtype, None, batch_invariant)

    def bind_all() -> _Bound:
        check_teacher(input, ids, probs, tail, ignore_index)
        head_args = (input, weight_shard, ids, bias_shard, None)
        call = bind(*head_args, raw_options, raw_chunking, divisor, token_weight, several=True, names=NAMES)
        checks.reduction(reduction, ("mean", "sum"))
        call = bind_shard(call, ranks, None, num_classes, class_start, sequence_parallel, check)
        return _Bound(call, probs, tail)

    bound = consistency.bound(name, group, ranks, bind_all, check)
    return token_loss.loss(*bind_loss(*bound), ranks.for_batches(batch_invariant))
