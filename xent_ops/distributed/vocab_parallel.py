"""Cross entropy where each rank holds some columns of the logits.

The operators are those of ops/shard.py, with one all-gather between them. All ranks read the same numbers in the same
order, so they get the same bits. Every rank calls ``backward()`` with the same upstream gradient. In eager training
the operators and the all-gather are one autograd node (function.py).

Sources: Megatron-LM's vocab_parallel_cross_entropy; the losses' linearity in (lse, x_t), kernels/reference_shard.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.options import LossOptions, Reduction
from ..kernels.reductions import divisor_of, reduce_rows
from ..ops import arguments, checks, transforms
from ..ops.dtensors import refuse_dtensor
from ..ops.library import check_call_of
from . import consistency, function, parts
from .groups import Group, Ranks, ranks_of

_ops = torch.ops.xent


class _Bound(NamedTuple):
    """The bound arguments of a call. consistency.py compares all of them."""

    target: Tensor  # (...)
    logits: Tensor  # (..., columns of this rank)
    class_weight: Tensor | None  # (columns of this rank,)
    shard_range: tuple[int, int]  # class_start, num_classes
    loss: LossOptions
    token_weight: Tensor | None  # (...)
    batch_invariant: bool


@arguments.named
def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    group: Group = None,
    *,
    num_classes: int,
    class_start: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    batch_invariant: bool = False,
    check: bool = False,
) -> Tensor:
    """``xent_ops.cross_entropy`` of logits whose classes are split between the ranks of a group.

    Every rank gets the same loss, bit for bit, if all ranks or none ask for a gradient (the mean has two kernels).
    Backward returns the gradient of its own columns and does not communicate. Forward all-gathers 3 numbers a row (4
    with class weights). Second derivatives, torch.func and forward-mode AD are not supported.

    Args:
        logits_shard: (..., columns of this rank), the classes last, from ``class_start`` on. Shards may differ in size
            and may be empty. Columns beyond ``num_classes`` are padding, with a gradient of 0.
        target: (...), class indices of the whole vocabulary, the same on every rank.
        group: the ranks that share the vocabulary: a ProcessGroup, a DeviceMesh of one dimension, a group's name, or
            None for all ranks. A compiled graph stores rank and size of a group that is passed by name. After you
            create new groups with old names, call ``torch.compiler.reset()``.
        num_classes: the size of the whole vocabulary.
        class_start: the first class of this rank. By default the split is that of torch.chunk and of DTensor's Shard:
            ceil(num_classes / ranks) classes each, as long as there are any.
        weight: (columns of this rank,), this rank's slice of the class weights; on every rank or on none.
        token_weight: as in ``xent_ops.cross_entropy``, the same on every rank.
        batch_invariant: as for ``xent_ops.token_log_probs``, for a row's loss (reduction="none") and its row of the
            gradient, and for one number of ranks and one split of the classes. Few rows do not take longer here.
        check: before anything is computed, exchange row counts, options, targets and shards between all ranks. Every
            rank raises ValueError if an argument of any rank is wrong, or if they do not fit together. Reads the target
            and synchronises; not in compiled graphs.
        ignore_index, reduction, label_smoothing, lse_square_scale, softcap, logit_scale: as in
            ``xent_ops.cross_entropy``; smoothing spreads over all ``num_classes``.

    Returns:
        The loss, float32 (float64 for float64 logits): (), or the target's shape with reduction="none".

    Raises:
        ValueError, TypeError, RuntimeError: for errors that this rank can see, before it communicates. The other ranks
            then wait for it (``check=True`` raises on all ranks).
        IndexError: on the CPU, for a target outside [0, num_classes) that is not ignore_index; on a GPU that row's
            loss and gradient are NaN.

    Shards that do not tile the vocabulary give NaN on every rank. Different targets or options on different ranks give
    wrong numbers without an error, unless ``check=True``. Different row counts give an error, or a hang, of the
    communication library.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> shard, target = torch.randn(8, 1024 // world, requires_grad=True), torch.arange(8)
        >>> loss = xent_ops.distributed.vocab_parallel_cross_entropy(shard, target, num_classes=1024)
        >>> loss.backward()
    """
    name, ranks = "distributed.vocab_parallel_cross_entropy", ranks_of(group)

    def bind_call() -> _Bound:
        arguments.tensors(logits_shard, target, weight, "logits_shard")
        raw_options = (ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction)
        loss = arguments.loss_options(*raw_options, logits_shard.dtype)
        checks.constant("weight", weight)
        arguments.optional("token_weight", token_weight)
        checks.token_weight(token_weight, target)
        refuse_dtensor("logits_shard", logits_shard, "xent_ops.cross_entropy")
        if logits_shard.dim() < 1:
            raise ValueError("logits_shard has no dimension; expected (..., columns of this rank)")
        shard_range = parts.shard_range(logits_shard.shape[-1], num_classes, class_start, ranks)
        arguments.boolean("batch_invariant", batch_invariant)
        if check:  # the errors that the operators would raise
            shard_args = (logits_shard, target, *shard_range, weight)
            check_call_of("cross_entropy_shard", *shard_args, **loss.row_options._asdict())
            checks.target_values(target, shard_range[1], loss.row_options.ignore_index)
        return _Bound(target, logits_shard, weight, shard_range, loss, token_weight, batch_invariant)

    bound = consistency.bind_and_compare(name, group, ranks, bind_call, check)
    return _loss(bound, ranks.for_batches(bound.batch_invariant))


def _loss(call: _Bound, ranks: Ranks) -> Tensor:
    """The loss from this rank's columns. The weights have no gradient."""
    target, logits, weight, shard_range, loss, token_weight, _ = call
    shard_args = (logits, target, weight, ranks, shard_range)
    wanted = logits.requires_grad and torch.is_grad_enabled()
    if token_weight is None and wanted and not transforms.is_traced():
        return function.apply(*shard_args, loss)
    gathered = parts.all_gather_shard_stats(*shard_args, loss.row_options)
    join_args = (logits, target, gathered, *shard_range, weight)
    if token_weight is None and loss.reduction != "none":
        return _ops.cross_entropy_shard_reduced(*join_args, **loss.keywords())[0]
    row_loss, lse, target_weight, *_ = _ops.cross_entropy_shard_join(*join_args, **loss.row_options.keywords())
    divisor = divisor_of(target_weight, target, loss.row_options.ignore_index, token_weight)
    return reduce_rows(row_loss, lse, target, divisor, loss, token_weight).value
