"""Several programs per row, if there are fewer rows than the GPU can hold programs. Another kernel joins their parts.

The order of the join is fixed: the same bits in every run.
"""

import triton
import triton.language as tl

from .forward import NO_COLUMN, scan
from .numerics import LOG2E, activation_of, row_offset, without_infinity
from .row_outputs import finish, shift_of, target_logit


@triton.jit(do_not_specialize=["n_parts", "ignore_index"], do_not_specialize_on_alignment=["n_inner"])
def partial_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    weight_ptr,  # (V,) in the accumulator's dtype
    sums_ptr,  # (N, 6, n_parts) in the accumulator's dtype: maximum, total, moment, smooth, weights, largest z
    first_ptr,  # (N, n_parts) int32
    n_cols,
    part_cols,  # columns of a part, a multiple of VECTOR
    n_parts,
    n_inner,
    stride_outer,
    stride_inner,
    ignore_index: "i64",
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One program for each part of a row: its sums."""
    ACC: tl.constexpr = sums_ptr.dtype.element_ty
    row = tl.program_id(0) // n_parts
    part = tl.program_id(0) - row * n_parts
    offset = row_offset(row, n_inner, stride_outer, stride_inner)
    act = activation_of(softcap, logit_scale, ACC)
    begin = part * part_cols
    n_read = tl.minimum(part_cols, n_cols - begin)
    shift = tl.cast(0.0, ACC)
    if FLAGS.smoothing or FLAGS.skip_ignored:
        target = tl.load(target_ptr + row).to(tl.int64)
        valid = (target >= 0) & (target < n_cols)
    if FLAGS.skip_ignored:
        valid &= target != ignore_index
        n_read = tl.where(target == ignore_index, 0, n_read)
    if FLAGS.smoothing:
        shift = shift_of(target_logit(logits_ptr + offset, target, valid, act, FLAGS), FLAGS)
    maximum, total, moment, smooth, weights, top, first = scan(
        logits_ptr, offset + begin, begin, n_read, n_cols, weight_ptr, act, shift, FLAGS,
        EDGES, BLOCK, VECTOR, ACC, "",
    )  # fmt: skip
    out_ptr = sums_ptr + tl.cast(row, tl.int64) * 6 * n_parts + part
    tl.store(out_ptr, maximum)
    tl.store(out_ptr + n_parts, total)
    if FLAGS.entropy:
        tl.store(out_ptr + 2 * n_parts, moment)
    if FLAGS.smoothing:
        tl.store(out_ptr + 3 * n_parts, smooth)
        if FLAGS.weight:
            tl.store(out_ptr + 4 * n_parts, weights)
    if FLAGS.argmax:
        tl.store(out_ptr + 5 * n_parts, top)
        tl.store(first_ptr + tl.cast(row, tl.int64) * n_parts + part, first)


@triton.jit(
    do_not_specialize=["n_parts", "ignore_index"],
    do_not_specialize_on_alignment=["n_inner"],
)
def join_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    weight_ptr,  # (V,) in the accumulator's dtype
    sums_ptr,  # as partial_kernel left them
    first_ptr,
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    argmax_ptr,  # (N,) int64
    entropy_ptr,  # (N,)
    lse_low_ptr,  # (N,): what the lse's rounding took
    n_cols,
    n_parts,
    n_inner,
    stride_outer,
    stride_inner,
    ignore_index: "i64",
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    PARTS: tl.constexpr,  # n_parts or more, a power of two
):
    """One program a row: joins its parts, in a tree with a shape that depends only on their number."""
    ACC: tl.constexpr = loss_ptr.dtype.element_ty
    row = tl.program_id(0)
    offset = row_offset(row, n_inner, stride_outer, stride_inner)
    label_smoothing = tl.cast(label_smoothing, ACC)
    act = activation_of(softcap, logit_scale, ACC)
    part = tl.arange(0, PARTS)
    exists = part < n_parts
    part_ptr = sums_ptr + tl.cast(row, tl.int64) * 6 * n_parts + part
    maxima = tl.load(part_ptr, mask=exists, other=float("-inf"))
    totals = tl.load(part_ptr + n_parts, mask=exists, other=0.0)
    target = tl.load(target_ptr + row).to(tl.int64)
    valid = (target >= 0) & (target < n_cols)
    if FLAGS.skip_ignored:
        valid &= target != ignore_index
    x_target = target_logit(logits_ptr + offset, target, valid, act, FLAGS)
    maximum = tl.max(maxima, axis=0)
    moved = maxima - without_infinity(maximum)
    decay = tl.exp2(moved * LOG2E)
    total = tl.sum(totals * decay, axis=0)
    moment = tl.cast(0.0, ACC)
    smooth = tl.cast(0.0, ACC)
    weights = tl.cast(0.0, ACC)
    top = tl.cast(float("-inf"), ACC)
    first = tl.cast(0, tl.int32)
    if FLAGS.entropy:
        moments = tl.load(part_ptr + 2 * n_parts, mask=exists, other=0.0)
        moment = tl.sum(tl.where(totals == 0.0, 0.0, (moments + moved * totals) * decay), axis=0)
    if FLAGS.smoothing:
        smooth = tl.sum(tl.load(part_ptr + 3 * n_parts, mask=exists, other=0.0), axis=0)
        if FLAGS.weight:
            weights = tl.sum(tl.load(part_ptr + 4 * n_parts, mask=exists, other=0.0), axis=0)
    if FLAGS.argmax:
        tops = tl.load(part_ptr + 5 * n_parts, mask=exists, other=float("-inf"))
        firsts = tl.load(first_ptr + tl.cast(row, tl.int64) * n_parts + part, mask=exists, other=NO_COLUMN)
        top = tl.max(tops, axis=0)
        first = tl.min(tl.where(tops == top, firsts, NO_COLUMN), axis=0)
    finish(
        row, True, n_cols, target, valid, x_target, shift_of(x_target, FLAGS), maximum, total, moment, smooth,
        weights, first, weight_ptr, loss_ptr, lse_ptr, argmax_ptr, entropy_ptr, lse_low_ptr, ignore_index,
        label_smoothing, FLAGS,
    )  # fmt: skip
