"""Reduces losses of rows in one or two launches. Plain torch takes five to nine, and more host time.

The order of the sums is fixed: the same bits in every run.
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
    FLAGS: tl.constexpr,
):
    if FLAGS.losses:
        value = loss
        if FLAGS.mean:
            value /= weight
        if FLAGS.lse_square:
            z_loss = lse_square_scale * square
            if FLAGS.mean:
                z_loss /= count
            value += z_loss
        tl.store(value_ptr, value)
    else:
        tl.store(value_ptr, 1.0 / weight)
        tl.store(value_ptr + 1, 1.0 / count)
    tl.store(divisor_ptr, weight)
    tl.store(divisor_ptr + 1, count)


@triton.jit(do_not_specialize=["n_rows", "n_classes", "ignore_index"])
def reduce_kernel(
    loss_ptr,  # (N,); not read without losses
    lse_ptr,  # (N,); not read without lse_square
    target_ptr,  # (N,), any integer dtype; not read without targets
    weight_ptr,  # (V,), with row_weights (N,), in the accumulator's dtype; not read without weights
    value_ptr,  # (); without losses (2,), 1 / divisor. partial: (4, programs), the sums of each program
    divisor_ptr,  # (2,): the sum of weights, and the number of counted rows. partial: not written
    n_rows: "i64",
    n_classes: "i64",
    ignore_index: "i64",
    lse_square_scale: "fp64",
    FLAGS: tl.constexpr,  # flags.SumFlags
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
        if FLAGS.losses:
            losses += tl.load(loss_ptr + rows, mask=inside, other=0.0)
        if FLAGS.targets:
            target = tl.load(target_ptr + rows, mask=inside, other=0).to(tl.int64)
            counted = inside & (target != ignore_index)
            counts += tl.where(counted, 1.0, 0.0).to(ACC)
            if FLAGS.lse_square:
                # An ignored row is masked before the square: padding may hold anything.
                lse = tl.load(lse_ptr + rows, mask=counted, other=0.0)
                squares += lse * lse
            if FLAGS.weights and not FLAGS.row_weights:
                valid = counted & (target >= 0) & (target < n_classes)
                weights += tl.load(weight_ptr + target, mask=valid, other=0.0)
        if FLAGS.weights and FLAGS.row_weights:
            weights += tl.load(weight_ptr + rows, mask=inside, other=0.0)
    loss = tl.sum(losses, axis=0)
    square = tl.sum(squares, axis=0)
    count = tl.sum(counts, axis=0)
    weight = tl.sum(weights, axis=0) if FLAGS.weights else count
    if FLAGS.partial:
        sums_ptr = value_ptr + program
        tl.store(sums_ptr, loss)
        tl.store(sums_ptr + programs, square)
        tl.store(sums_ptr + 2 * programs, weight)
        tl.store(sums_ptr + 3 * programs, count)
    else:
        scale = tl.cast(lse_square_scale, ACC)
        _store(loss, square, weight, count, value_ptr, divisor_ptr, scale, FLAGS)


@triton.jit
def _total(sums_ptr, part, exists):
    return tl.sum(tl.load(sums_ptr + part, mask=exists, other=0.0), axis=0)


@triton.jit(do_not_specialize=["n_parts"])
def join_sums_kernel(
    sums_ptr,  # (4, n_parts), as the programs of reduce_kernel left them
    value_ptr,  # as in reduce_kernel
    divisor_ptr,
    n_parts: "i32",
    lse_square_scale: "fp64",
    FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,  # n_parts or more
):
    """One program."""
    part = tl.arange(0, BLOCK)
    exists = part < n_parts
    # Sums without their flag were not computed. Without weights every counted row weighs one.
    loss = _total(sums_ptr, part, exists) if FLAGS.losses else 0.0
    square = _total(sums_ptr + n_parts, part, exists) if FLAGS.lse_square else 0.0
    count = _total(sums_ptr + 3 * n_parts, part, exists) if FLAGS.targets else 0.0
    weight = _total(sums_ptr + 2 * n_parts, part, exists) if FLAGS.weights else count
    scale = tl.cast(lse_square_scale, divisor_ptr.dtype.element_ty)
    _store(loss, square, weight, count, value_ptr, divisor_ptr, scale, FLAGS)
