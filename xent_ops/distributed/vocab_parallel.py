"""Cross entropy where each rank holds some columns of the logits.

One collective forward and none backward. Each rank makes 3 numbers a row (4 with class weights) of its columns by
``xent::cross_entropy_shard``, one all-gather hands them to every rank, and ``xent::cross_entropy_shard_join`` makes
loss and lse of them: from the same numbers in the same order, so the same bits on every rank. The gradient of a shard
needs the lse of all ranks and nothing else of theirs: the join's autograd formula is one kernel over the shard. In a
compiled graph the collective stands between the operators as ``_c10d_functional`` nodes, for Inductor to overlap and
reorder; eager training calls the same kernels inside one node of autograd (eager.py). Memory beyond the logits: the
gradient of the shard, and a few numbers a row.

The loss is the same on every rank, so every rank calls ``backward()`` with the same upstream gradient, and gets the
gradient of its own columns.

Sources: Megatron-LM's vocab_parallel_cross_entropy; the losses' linearity in (lse, x_t), kernels/reference_shard.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import checks, transforms
from ..ops.composite import reduce_rows
from ..ops.eager import Settings, apply_prepared, kernels_for, ready, undisturbed
from . import consistency, eager
from .groups import Group, Place, place
from .parts import counts_of, everyones_parts, first_class, traced_gather


class Rows(NamedTuple):
    """One value a row, the same on every rank of the group."""

    loss: Tensor
    lse: Tensor
    weight: Tensor  # of the row's target; 0 in ignored rows; 1 without class weights


def sharded_rows(
    logits: Tensor,  # (..., columns of this rank)
    target: Tensor,  # (...)
    weight: Tensor | None,  # (columns of this rank,)
    here: Place,
    *,
    num_classes: int,
    class_start: int | None,
    **options: Any,
) -> Rows:
    start = first_class(logits.shape[-1], class_start, num_classes, here)
    checks.weight_without_grad(weight)
    kernels = kernels_for(logits, target, weight, **options)
    everyones = everyones_parts(kernels, logits, target, weight, here, start, num_classes, options, traced_gather)
    loss, lse, target_weight, _ = torch.ops.xent.cross_entropy_shard_join(
        logits, target, everyones, start, num_classes, weight, **options
    )
    return Rows(loss, lse, target_weight)


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    group: Group = None,
    *,
    num_classes: int,
    class_start: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    check: bool = False,
) -> Tensor:
    """``xent_ops.cross_entropy`` of logits whose classes are split between the ranks of a group.

    Every rank gets the loss, bit for bit the same (where all of them, or none, ask for a gradient: the mean over the
    rows has two kernels), and in backward the gradient of its own columns. One all-gather of 3 numbers a row (4 with
    class weights) forward, no communication backward. No second derivative, no torch.func, no forward-mode AD.

    Args:
        logits_shard: (..., columns of this rank), the classes last, from ``class_start`` on. Shards may differ in size
            and may be empty. Columns beyond ``num_classes`` are padding, with a gradient of 0.
        target: (...), class indices of the whole vocabulary, the same on every rank.
        group: the ranks that share the vocabulary: a ProcessGroup, a DeviceMesh of one dimension, a group's name, or
            None for all ranks. A compiled graph holds rank and size of a group given by name: after groups were made
            anew under old names, call ``torch.compiler.reset()``.
        num_classes: the size of the whole vocabulary.
        class_start: the first class of this rank. By default the split is that of torch.chunk and of DTensor's Shard:
            ceil(num_classes / ranks) classes each, as long as there are any.
        weight: (columns of this rank,), this rank's slice of the class weights; on every rank or on none.
        check: before anything is computed, exchange row counts, options, targets and shards between all ranks. Every
            rank raises ValueError if an argument of any rank is wrong, or if they do not fit together. Reads the target
            and synchronises; not in compiled graphs.
        ignore_index, reduction, label_smoothing, lse_square_scale, softcap, logit_scale: as in
            ``xent_ops.cross_entropy``; smoothing spreads over all ``num_classes``.

    Returns:
        float32 (float64 for float64 logits): (), or the target's shape with reduction="none".

    Raises:
        ValueError, TypeError, RuntimeError: for what this rank can see, before it communicates; the other ranks then
            wait for it (``check=True`` raises everywhere).
        IndexError: on the CPU, for a target outside [0, num_classes) that is not ignore_index; on a GPU that row's
            loss and gradient are NaN.

    Shards that do not tile the vocabulary give NaN on every rank. Without ``check=True`` nobody notices when ranks pass
    different targets or options: the numbers are then wrong. Different row counts are an error, or a hang, of the
    communication library.
    """
    if check:
        consistency.check(
            logits_shard,
            target,
            group,
            num_classes=num_classes,
            class_start=class_start,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale,
            softcap=softcap,
            logit_scale=logit_scale,
        )
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, _ = checks.arguments(
        logits_shard,
        target,
        weight,
        ignore_index,
        label_smoothing,
        lse_square_scale,
        softcap,
        logit_scale,
        reduction,
        input_name="logits_shard",
    )
    num_classes, class_start = consistency.shard_range(logits_shard, num_classes, class_start)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "logit_scale": logit_scale,
    }
    here = place(group)
    settings = Settings(reduction, lse_square_scale, options)
    if weight is None and not check and not torch.compiler.is_compiling():
        prepared = ready(logits_shard, target, settings, here, class_start, num_classes)
        if prepared is not None:
            return apply_prepared(logits_shard, target, prepared)
    transforms.refuse(consistency.NAME)
    if (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and logits_shard.requires_grad
        and undisturbed(logits_shard, target, weight, lse_square_scale=lse_square_scale, **options)
    ):
        return eager.cross_entropy(logits_shard, target, weight, here, class_start, num_classes, settings)
    rows = sharded_rows(logits_shard, target, weight, here, num_classes=num_classes, class_start=class_start, **options)
    loss_options: dict[str, Any] = {"lse_square_scale": lse_square_scale, "reduction": reduction}
    counts = counts_of(rows.weight, target, ignore_index=ignore_index, **loss_options)
    return reduce_rows(rows.loss, rows.lse, counts, **loss_options).loss
