"""One pass over a row of logits: loss, lse and, if they are asked for, argmax and entropy."""

import triton
import triton.language as tl

from ..triton.numerics import activate_by, row_offset, split_lse, without_infinity


@triton.jit
def activate(z, logit_scale, softcap, HAS_SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """x = softcap(logit_scale * z). A multiplication by 1 would cost a pass over the tile."""
    if HAS_SCALE or SOFTCAP != 0:
        x = activate_by(z, softcap, logit_scale, SOFTCAP)
    else:
        x = z
    return x


@triton.jit
def _visit(
    pointers,  # (BLOCK,) into the logits of the row
    weight_pointers,  # (BLOCK,) into the class weights
    lane,  # (BLOCK,) 0, 1, ... as float32
    left,  # columns from the first lane to the end of the row; not read unless MASKED
    maximum,  # the running state, all scalars: the largest x,
    total,  # the sum of e^(x - maximum),
    moment,  # the sum of e^(x - maximum) (x - maximum),
    smooth,  # the (weighted) sum of x - shift
    weights,  # the sum of weights
    shift,
    logit_scale,
    softcap,
    MASKED: tl.constexpr,  # the tile ends behind the row
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,  # logit_scale is not 1
    SOFTCAP: tl.constexpr,  # see softcap of triton/configs.py
    HAS_ARGMAX: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """Fold one tile of the row into the running state. It also returns the largest z of the tile, before softcap."""
    # PLAIN: the next operations keep the -inf beyond the row. Else padding is 0 until it is replaced.
    PLAIN: tl.constexpr = not ((HAS_SMOOTHING or HAS_SCALE) or SOFTCAP != 0)
    if MASKED:
        exists = tl.arange(0, pointers.shape[0]) < left  # a mask of the addresses: it becomes the length of a copy
        z = tl.load(pointers, mask=exists, other=float("-inf") if PLAIN else 0.0)
    else:
        z = tl.load(pointers)
    z = z.to(tl.float32)
    x = activate(z, logit_scale, softcap, HAS_SCALE, SOFTCAP)
    if HAS_SMOOTHING:
        relative = x - shift
        if HAS_WEIGHT:
            if MASKED:
                w = tl.load(weight_pointers, mask=exists, other=0.0)
            else:
                w = tl.load(weight_pointers)
            relative *= w
            weights += tl.sum(w, axis=0)
        if MASKED:
            relative = tl.where(lane < left.to(tl.float32), relative, 0.0)
        smooth += tl.sum(relative, axis=0)
    if MASKED and not PLAIN:
        # After softcap, which would turn -inf into -softcap. A float mask: integers would not compare as vectors.
        inside = lane < left.to(tl.float32)
        x = tl.where(inside, x, float("-inf"))
    tile_maximum = tl.max(x, axis=0)
    tile_top = tile_maximum
    if HAS_ARGMAX:  # noqa: SIM102 (both are known when compiling)
        if SOFTCAP != 0:  # softcap may round different logits to the same x
            z *= logit_scale
            if MASKED:
                z = tl.where(inside, z, float("-inf"))
            tile_top = tl.max(z, axis=0)
    new_maximum = tl.maximum(maximum, tile_maximum)
    pivot = without_infinity(new_maximum)
    moved = maximum - pivot
    decay = tl.exp(moved)
    distance = x - pivot
    e = tl.exp(distance)
    if HAS_ENTROPY:
        moment = tl.where(total == 0.0, 0.0, decay * (moment + moved * total))
        moment += tl.sum(tl.where(e == 0.0, 0.0, e * distance), axis=0)
    total = total * decay + tl.sum(e, axis=0)
    return new_maximum, total, moment, smooth, weights, tile_top


@triton.jit
def _first_of(pointers, lane, left, top, logit_scale):
    """The first column of a tile that holds ``top``, before softcap; 0 for none. It reads this one tile again."""
    exists = tl.arange(0, pointers.shape[0]) < left
    z = tl.load(pointers, mask=exists, other=0.0).to(tl.float32) * logit_scale
    z = tl.where(lane < left.to(tl.float32), z, float("-inf"))
    first = tl.min(tl.where(z == top, lane, float("inf")), axis=0)
    return tl.where(first < left.to(tl.float32), first, 0.0).to(tl.int32)


@triton.jit
def scan(
    row_ptr,
    weight_ptr,
    columns,  # (BLOCK,) 0, 1, ...
    n_cols,
    shift,
    logit_scale,
    softcap,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The state of _visit after a whole row, the largest z, and the start of the first tile that holds it."""
    lane = columns.to(tl.float32)
    n_full = n_cols // BLOCK * BLOCK
    maximum = tl.cast(float("-inf"), tl.float32)
    total = tl.cast(0.0, tl.float32)
    moment = tl.cast(0.0, tl.float32)
    smooth = tl.cast(0.0, tl.float32)
    weights = tl.cast(0.0, tl.float32)
    top = tl.cast(float("-inf"), tl.float32)
    top_start = tl.cast(0, tl.int32)
    for start in tl.range(0, n_full, BLOCK):
        maximum, total, moment, smooth, weights, tile_top = _visit(
            row_ptr + start + columns, weight_ptr + start + columns, lane, n_cols, maximum, total, moment, smooth,
            weights, shift, logit_scale, softcap, False, HAS_WEIGHT, HAS_SMOOTHING, HAS_SCALE, SOFTCAP, HAS_ARGMAX,
            HAS_ENTROPY,
        )  # fmt: skip
        if HAS_ARGMAX:
            top_start = tl.where(tile_top > top, start, top_start)
            top = tl.maximum(top, tile_top)
    if n_full < n_cols:
        maximum, total, moment, smooth, weights, tile_top = _visit(
            row_ptr + n_full + columns, weight_ptr + n_full + columns, lane, n_cols - n_full, maximum, total, moment,
            smooth, weights, shift, logit_scale, softcap, True, HAS_WEIGHT, HAS_SMOOTHING, HAS_SCALE, SOFTCAP,
            HAS_ARGMAX, HAS_ENTROPY,
        )  # fmt: skip
        if HAS_ARGMAX:
            top_start = tl.where(tile_top > top, n_full, top_start)
            top = tl.maximum(top, tile_top)
    return maximum, total, moment, smooth, weights, top, top_start


@triton.jit
def shift_of(x):
    """The number that a smoothing sum subtracts: one x of the row if it is finite, else 0."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit(
    do_not_specialize=["n_rows", "chunk", "n_inner", "ignore_index", "label_smoothing", "softcap", "logit_scale"]
)
def forward_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, int64 or int32
    weight_ptr,  # (V,) float32
    loss_ptr,  # (N,) float32
    lse_ptr,  # (N,) float32
    argmax_ptr,  # (N,) int64
    entropy_ptr,  # (N,) float32
    lse_low_ptr,  # (N,) float32: what the rounding of the lse took
    n_rows,
    chunk,  # rows of a program
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    SKIP_IGNORED: tl.constexpr,  # ignored rows are not read, their lse is infinite
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program handles a chunk of rows, one after the other. Exponentials are relative to a running maximum."""
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    columns = tl.arange(0, BLOCK)
    lane = columns.to(tl.float32)
    for row in tl.range(begin, end):
        row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
        target = tl.load(target_ptr + row).to(tl.int64)
        if SKIP_IGNORED:
            read = target != ignore_index
        else:
            read = True
        if read:
            valid = (target >= 0) & (target < n_cols)
            column = tl.where(valid, target, 0)
            x_target = activate(tl.load(row_ptr + column).to(tl.float32), logit_scale, softcap, HAS_SCALE, SOFTCAP)
            shift = shift_of(x_target)
            maximum, total, moment, smooth, weights, top, top_start = scan(
                row_ptr, weight_ptr, columns, n_cols, shift, logit_scale, softcap, HAS_WEIGHT, HAS_SMOOTHING,
                HAS_SCALE, SOFTCAP, HAS_ARGMAX, HAS_ENTROPY, BLOCK,
            )  # fmt: skip
            pivot = without_infinity(maximum)
            log_total = tl.log(total)
            # Relative to the maximum until the end: lse - x_target would lose digits when both are large.
            loss = pivot - x_target + log_total
            if HAS_WEIGHT:
                loss *= tl.load(weight_ptr + column)
            if HAS_SMOOTHING:
                if not HAS_WEIGHT:
                    weights = tl.cast(n_cols, tl.float32)
                smooth_loss = weights * (pivot - shift + log_total) - smooth
                loss = (1.0 - label_smoothing) * loss + label_smoothing / n_cols * smooth_loss
            loss = tl.where(valid, loss, float("nan"))
            loss = tl.where(target == ignore_index, 0.0, loss)
            tl.store(loss_ptr + row, loss)
            lse, lse_low = split_lse(pivot, log_total)
            tl.store(lse_ptr + row, lse)
            tl.store(lse_low_ptr + row, lse_low)
            if HAS_ENTROPY:
                entropy = log_total - moment / total
                tl.store(entropy_ptr + row, tl.where(target == ignore_index, 0.0, entropy))
            if HAS_ARGMAX:
                first = _first_of(row_ptr + top_start + columns, lane, n_cols - top_start, top, logit_scale)
                tl.store(argmax_ptr + row, (top_start + first).to(tl.int64))
        else:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, float("inf"))
            tl.store(lse_low_ptr + row, 0.0)
            if HAS_ENTROPY:
                tl.store(entropy_ptr + row, 0.0)
