"""One visit of a row of logits: loss, lse and, where asked for, argmax and entropy."""

import triton
import triton.language as tl

from .numerics import LN2, LOG2E, activate, row_offset, without_infinity


@triton.jit
def _visit(
    state,  # see forward_kernel
    row_ptr,  # logits of the row, (V,)
    weight_ptr,  # (V,)
    start,  # first column of the tile
    n_cols,
    logit_scale,
    softcap,
    shift,  # x of the target where finite: what the smoothing sum is taken relative to
    MASKED: tl.constexpr,  # the tile may reach beyond the row
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Fold the tile [start, start + BLOCK) into the running state."""
    maximum, total, moment, smooth, weights, best, best_start = state
    lane = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    columns = start + lane
    if MASKED:
        inside = columns < n_cols
        z = tl.load(row_ptr + columns, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        z = tl.load(row_ptr + columns, eviction_policy="evict_first")
    z = z.to(total.dtype) * logit_scale
    x = activate(z, softcap, HAS_SOFTCAP)
    if HAS_SMOOTHING:
        relative = x - shift
        if HAS_WEIGHT:
            w = tl.load(weight_ptr + columns, mask=columns < n_cols, other=0.0).to(total.dtype)
            relative *= w
            weights += tl.sum(w, axis=1)
        if MASKED:
            relative = tl.where(inside, relative, 0.0)
        smooth += tl.sum(relative, axis=1)
    if MASKED:
        x = tl.where(inside, x, float("-inf"))  # after softcap, which would make -softcap of -inf
        z = tl.where(inside, z, float("-inf"))
    if HAS_ARGMAX:
        better = z > best
        best = tl.where(better, z, best)
        best_start = tl.where(better, start, best_start)
    # One maximum a thread's vector instead of one a tile: nothing crosses threads inside the loop, at the price of
    # one more exponential for VECTOR elements.
    new_maximum = tl.maximum(maximum, tl.max(x, axis=1))
    pivot = without_infinity(new_maximum)
    moved = maximum - pivot
    decay = tl.exp2(moved * LOG2E)
    distance = x - pivot[:, None]
    e = tl.exp2(distance * LOG2E)
    if HAS_ENTROPY:
        moment = decay * tl.where(total == 0.0, 0.0, moment + moved * total)
        moment += tl.sum(tl.where(e == 0.0, 0.0, e * distance), axis=1)
    total = total * decay + tl.sum(e, axis=1)
    return new_maximum, total, moment, smooth, weights, best, best_start


@triton.jit(do_not_specialize=["n_inner", "ignore_index", "label_smoothing", "softcap", "logit_scale"])
def forward_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    weight_ptr,  # (V,) in the accumulator's dtype
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    argmax_ptr,  # (N,) int64
    entropy_ptr,  # (N,)
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    ignore_index: "i64",
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One program a row. The exponentials are summed relative to a running maximum (online softmax)."""
    ACC: tl.constexpr = loss_ptr.dtype.element_ty
    row = tl.program_id(0)
    row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    label_smoothing = tl.cast(label_smoothing, ACC)
    softcap = tl.cast(softcap, ACC)
    logit_scale = tl.cast(logit_scale, ACC)

    target = tl.load(target_ptr + row).to(tl.int64)
    valid = (target >= 0) & (target < n_cols)
    z_target = tl.load(row_ptr + target, mask=valid, other=0.0).to(ACC) * logit_scale
    x_target = activate(z_target, softcap, HAS_SOFTCAP)
    shift = tl.where(tl.abs(x_target) < float("inf"), x_target, 0.0)

    LANES: tl.constexpr = BLOCK // VECTOR
    maximum = tl.full([LANES], float("-inf"), ACC)
    zero = tl.zeros([LANES], ACC)
    best = tl.full([LANES, VECTOR], float("-inf"), ACC)
    best_start = tl.zeros([LANES, VECTOR], tl.int32)
    state = (maximum, zero, zero, zero, zero, best, best_start)
    n_full = n_cols // BLOCK * BLOCK
    for start in tl.range(0, n_full, BLOCK):
        state = _visit(
            state, row_ptr, weight_ptr, start, n_cols, logit_scale, softcap, shift,
            False, HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, HAS_ARGMAX, HAS_ENTROPY, BLOCK, VECTOR,
        )  # fmt: skip
    if n_full < n_cols:
        state = _visit(
            state, row_ptr, weight_ptr, n_full, n_cols, logit_scale, softcap, shift,
            True, HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP, HAS_ARGMAX, HAS_ENTROPY, BLOCK, VECTOR,
        )  # fmt: skip
    maximum, total, moment, smooth, weights, best, best_start = state

    row_maximum = tl.max(maximum, axis=0)
    pivot = without_infinity(row_maximum)
    moved = maximum - pivot
    decay = tl.exp2(moved * LOG2E)
    row_total = tl.sum(total * decay, axis=0)
    log_total = tl.log2(row_total) * LN2
    # Relative to the maximum until the end: lse - x_target would lose digits when both are large.
    loss = pivot - x_target + log_total
    if HAS_SMOOTHING:
        sum_weights = tl.sum(weights, axis=0) if HAS_WEIGHT else tl.cast(n_cols, ACC)
        smooth_loss = sum_weights * (pivot - shift + log_total) - tl.sum(smooth, axis=0)
    if HAS_WEIGHT:
        loss *= tl.load(weight_ptr + target, mask=valid, other=0.0)
    if HAS_SMOOTHING:
        loss = (1.0 - label_smoothing) * loss + label_smoothing / n_cols * smooth_loss
    loss = tl.where(valid, loss, float("nan"))
    loss = tl.where(target == ignore_index, 0.0, loss)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, pivot + log_total)
    if HAS_ENTROPY:
        row_moment = tl.sum(tl.where(total == 0.0, 0.0, (moment + moved * total) * decay), axis=0)
        tl.store(entropy_ptr + row, log_total - row_moment / row_total)
    if HAS_ARGMAX:
        columns = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :] + best_start
        top = tl.max(tl.max(best, axis=1), axis=0)
        first = tl.where(best == top, columns, 2147483647)
        tl.store(argmax_ptr + row, tl.min(tl.min(first, axis=1), axis=0).to(tl.int64))
