"""From losses of rows to a reduced loss, in a launch or two: plain torch takes five to nine, and the host longer.

The sums have one order, whatever runs first: the same bits in every run.
"""

import triton
import triton.language as tl


@triton.jit
def _store(
    loss,  # sum of losses
    square,  # sum of lse^2 of counted rows
    weight,  # sum of weights
    count,  # number of counted rows
    value_ptr,
    divisor_ptr,
    lse_square_scale,
    HAS_LOSS: tl.constexpr,
    HAS_LSE_SQUARE: tl.constexpr,
    MEAN: tl.constexpr,
):
    if HAS_LOSS:
        value = loss
        if MEAN:
            value /= weight
        if HAS_LSE_SQUARE:
            z_loss = lse_square_scale * square
            if MEAN:
                z_loss /= count
            value += z_loss
        tl.store(value_ptr, value)
    else:
        tl.store(value_ptr, 1.0 / weight)
        tl.store(value_ptr + 1, 1.0 / count)
    tl.store(divisor_ptr, weight)
    tl.store(divisor_ptr + 1, count)


@triton.jit(do_not_specialize=["n_rows", "n_classes", "ignore_index", "lse_square_scale"])
def reduce_kernel(
    loss_ptr,  # (N,); not read without HAS_LOSS
    lse_ptr,  # (N,); not read without HAS_LSE_SQUARE
    target_ptr,  # (N,), any integer dtype; not read without HAS_TARGET
    weight_ptr,  # (V,), ROW_WEIGHTS: (N,), in the accumulator's dtype; not read without HAS_WEIGHT
    value_ptr,  # (); without HAS_LOSS (2,): 1 / divisor. PARTIAL: (4, programs), the sums of each
    divisor_ptr,  # (2,): the sum of weights, and the number of counted rows. PARTIAL: not written
    n_rows: "i64",
    n_classes: "i64",
    ignore_index: "i64",
    lse_square_scale: "fp64",
    HAS_LOSS: tl.constexpr,
    HAS_LSE_SQUARE: tl.constexpr,
    HAS_TARGET: tl.constexpr,  # without it no row is counted: a plain sum of losses
    HAS_WEIGHT: tl.constexpr,
    ROW_WEIGHTS: tl.constexpr,  # what each row counts instead of the weights of classes
    MEAN: tl.constexpr,  # or the sum
    PARTIAL: tl.constexpr,  # one of several programs, whose sums join_sums_kernel adds
    BLOCK: tl.constexpr,
):
    """loss / weight + lse_square_scale * square / count, or without the divisions; NaN for a mean of no row."""
    ACC: tl.constexpr = divisor_ptr.dtype.element_ty
    program = tl.cast(tl.program_id(0), tl.int64)
    programs = tl.num_programs(0)
    losses = tl.zeros([BLOCK], ACC)
    squares = tl.zeros([BLOCK], ACC)
    weights = tl.zeros([BLOCK], ACC)
    counts = tl.zeros([BLOCK], ACC)
    for start in tl.range(program * BLOCK, n_rows, programs * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < n_rows
        if HAS_LOSS:
            losses += tl.load(loss_ptr + rows, mask=inside, other=0.0)
        if HAS_TARGET:
            target = tl.load(target_ptr + rows, mask=inside, other=0).to(tl.int64)
            counted = inside & (target != ignore_index)
            counts += tl.where(counted, 1.0, 0.0).to(ACC)
            if HAS_LSE_SQUARE:
                # An ignored row is masked before the square: padding may hold anything.
                lse = tl.load(lse_ptr + rows, mask=counted, other=0.0)
                squares += lse * lse
            if HAS_WEIGHT and not ROW_WEIGHTS:
                valid = counted & (target >= 0) & (target < n_classes)
                weights += tl.load(weight_ptr + target, mask=valid, other=0.0)
        if HAS_WEIGHT and ROW_WEIGHTS:
            weights += tl.load(weight_ptr + rows, mask=inside, other=0.0)
    loss = tl.sum(losses, axis=0)
    square = tl.sum(squares, axis=0)
    count = tl.sum(counts, axis=0)
    weight = tl.sum(weights, axis=0) if HAS_WEIGHT else count
    if PARTIAL:
        sums_ptr = value_ptr + program
        tl.store(sums_ptr, loss)
        tl.store(sums_ptr + programs, square)
        tl.store(sums_ptr + 2 * programs, weight)
        tl.store(sums_ptr + 3 * programs, count)
    else:
        scale = tl.cast(lse_square_scale, ACC)
        _store(loss, square, weight, count, value_ptr, divisor_ptr, scale, HAS_LOSS, HAS_LSE_SQUARE, MEAN)


@triton.jit(do_not_specialize=["n_parts", "lse_square_scale"])
def join_sums_kernel(
    sums_ptr,  # (4, n_parts), as the programs of reduce_kernel left them
    value_ptr,  # as in reduce_kernel
    divisor_ptr,
    n_parts: "i32",
    lse_square_scale: "fp64",
    HAS_LOSS: tl.constexpr,
    HAS_LSE_SQUARE: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,  # n_parts or more
):
    """One program."""
    part = tl.arange(0, BLOCK)
    exists = part < n_parts
    loss = tl.sum(tl.load(sums_ptr + part, mask=exists, other=0.0), axis=0)
    square = tl.sum(tl.load(sums_ptr + n_parts + part, mask=exists, other=0.0), axis=0)
    weight = tl.sum(tl.load(sums_ptr + 2 * n_parts + part, mask=exists, other=0.0), axis=0)
    count = tl.sum(tl.load(sums_ptr + 3 * n_parts + part, mask=exists, other=0.0), axis=0)
    scale = tl.cast(lse_square_scale, divisor_ptr.dtype.element_ty)
    _store(loss, square, weight, count, value_ptr, divisor_ptr, scale, HAS_LOSS, HAS_LSE_SQUARE, MEAN)
