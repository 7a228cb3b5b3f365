"""Computes the outputs of a row from its sums: the end of all forward kernels."""

import triton
import triton.language as tl

from .numerics import LN2, activate, split_lse, without_infinity


@triton.jit
def target_logit(row_ptr, target, valid, act, FLAGS: tl.constexpr):
    """x of the target. Nothing is read if the target is out of range."""
    return activate(tl.load(row_ptr + target, mask=valid, other=0.0), act, FLAGS)


@triton.jit
def shift_of(x_target, FLAGS: tl.constexpr):
    """The number that the smoothing sum subtracts: the target's x if it is finite, else 0."""
    if FLAGS.softcap == 2:
        shift = tl.zeros_like(x_target)
    else:
        shift = tl.where(tl.abs(x_target) < float("inf"), x_target, 0.0)
    return shift


@triton.jit
def finish(
    row,
    exists,  # whether this row exists
    n_cols,
    target,
    valid,
    x_target,
    shift,
    maximum,
    total,
    moment,
    smooth,
    weights,
    first,  # n_cols or more if no logit is greater than -inf
    weight_ptr,
    loss_ptr,
    lse_ptr,
    argmax_ptr,
    entropy_ptr,
    lse_low_ptr,
    ignore_index,
    label_smoothing,
    FLAGS: tl.constexpr,
):
    """The outputs of a row, or of a vector of rows, from their sums."""
    pivot = without_infinity(maximum)
    log_total = tl.log2(total) * LN2
    # Relative to the maximum until the end: lse - x_target would lose digits if both are large.
    loss = pivot - x_target + log_total
    if FLAGS.softcap == 2:  # relative to 0, not to the largest x: rounding may leave it just below 0
        loss = tl.maximum(loss, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if FLAGS.weight:
        loss *= tl.load(weight_ptr + target, mask=valid, other=0.0)
    if FLAGS.smoothing:
        if not FLAGS.weight:
            weights = tl.cast(n_cols, loss.dtype)
        smooth_loss = weights * (pivot - shift + log_total) - smooth
        loss = (1.0 - label_smoothing) * loss + label_smoothing / n_cols * smooth_loss
    loss = tl.where(valid, loss, float("nan"))
    loss = tl.where(target == ignore_index, 0.0, loss)
    tl.store(loss_ptr + row, loss, mask=exists)
    lse, lse_low = split_lse(pivot, log_total)
    if FLAGS.skip_ignored:
        lse = tl.where(target == ignore_index, float("inf"), lse)
        lse_low = tl.where(target == ignore_index, 0.0, lse_low)
    tl.store(lse_ptr + row, lse, mask=exists)
    if FLAGS.lse_low:
        tl.store(lse_low_ptr + row, lse_low, mask=exists)
    if FLAGS.entropy:
        entropy = log_total - moment / total
        if FLAGS.softcap == 2:  # as above
            entropy = tl.maximum(entropy, 0.0, propagate_nan=tl.PropagateNan.ALL)
        entropy = tl.where(target == ignore_index, 0.0, entropy)
        tl.store(entropy_ptr + row, entropy, mask=exists)
    if FLAGS.argmax:
        first = tl.where(first < n_cols, first, 0)
        if FLAGS.skip_ignored:
            first = tl.where(target == ignore_index, -1, first)
        tl.store(argmax_ptr + row, first.to(tl.int64), mask=exists)
