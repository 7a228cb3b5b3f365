"""Reduces losses of rows in one or two launches. Plain torch takes five to fifteen, and more host time.

The order of the sums is fixed: the same bits in every run.
"""

import triton
import triton.language as tl


@triton.jit
def _store(
    sums,  # of losses, lse^2, weights, token weights or ones, hits, ones: each over the counted rows
    pointers,  # given, value, square, accuracy, divisors, as in reduce_kernel
    lse_square_scale,
    FLAGS: tl.constexpr,
):
    """The two divisors too."""
    loss, square, weight, count, hits, number = sums
    given_ptr, value_ptr, square_ptr, accuracy_ptr, divisor_ptr = pointers
    ACC: tl.constexpr = divisor_ptr.dtype.element_ty
    if FLAGS.given > 0:
        weight = tl.load(given_ptr).to(ACC)
        count = tl.load(given_ptr + FLAGS.given - 1).to(ACC)
    if FLAGS.losses:
        value = loss
        if FLAGS.mean:
            value /= weight
        if FLAGS.lse_square:
            square *= lse_square_scale
            if FLAGS.mean:
                square /= count
            value += square
        tl.store(value_ptr, value)
        if FLAGS.hits:
            tl.store(square_ptr, tl.cast(square, ACC))
            tl.store(accuracy_ptr, hits / number)
    elif not FLAGS.factors:
        tl.store(value_ptr, 1.0 / weight)
        if FLAGS.lse_square:
            tl.store(square_ptr, lse_square_scale * (1.0 / count))
    if FLAGS.given < 2:
        tl.store(divisor_ptr, weight)
        tl.store(divisor_ptr + 1, count)
    return weight, count


@triton.jit(do_not_specialize=["n_rows", "n_classes", "ignore_index"])
def reduce_kernel(
    loss_ptr,  # (N,); not read without losses
    lse_ptr,  # (N,); not read without lse_square and losses
    target_ptr,  # (N,), any integer dtype; not read without targets
    weight_ptr,  # (V,), with row_weights (N,), in the accumulator's dtype; not read without weights
    token_ptr,  # (N,), weights of rows, any dtype; not read without token_weights
    argmax_ptr,  # (N,), int64; not read without hits
    given_ptr,  # divisors; not read unless given
    value_ptr,  # (); without losses 1 / the first divisor. partial: (6, programs), the sums of each program
    square_ptr,  # (), with hits the z-loss; without losses lse_square_scale / the second divisor
    accuracy_ptr,  # (), written with hits
    divisor_ptr,  # (2,): the sum of weights, and the number of counted rows. partial, or two given: not written
    n_rows: "i64",
    n_classes: "i64",
    ignore_index: "i64",
    lse_square_scale: "fp64",
    FLAGS: tl.constexpr,  # flags.SumFlags
    BLOCK: tl.constexpr,
):
    """loss / weight + lse_square_scale * square / count, or without the divisions; NaN for a mean of no row.

    With factors, value and square are (N,): times each row's token weight, 0 in ignored rows.
    """
    ACC: tl.constexpr = divisor_ptr.dtype.element_ty
    program = tl.cast(tl.program_id(0), tl.int64)
    programs = tl.num_programs(0)
    losses = tl.zeros([BLOCK], ACC)
    squares = tl.zeros([BLOCK], ACC)
    weights = tl.zeros([BLOCK], ACC)
    counts = tl.zeros([BLOCK], ACC)
    all_hits = tl.zeros([BLOCK], ACC)
    numbers = tl.zeros([BLOCK], ACC)
    for start in tl.range(program * BLOCK, n_rows, programs * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < n_rows
        if FLAGS.losses:
            loss = tl.load(loss_ptr + rows, mask=inside, other=0.0).to(ACC)
        if FLAGS.targets:
            target = tl.load(target_ptr + rows, mask=inside, other=0).to(tl.int64)
            counted = inside & (target != ignore_index)
            count = tl.where(counted, 1.0, 0.0).to(ACC)
            if FLAGS.losses:
                loss = tl.where(counted, loss, 0.0)
            if FLAGS.hits:
                top = tl.load(argmax_ptr + rows, mask=counted, other=-1)
                all_hits += tl.where(counted & (top == target), 1.0, 0.0).to(ACC)
                numbers += count
            if FLAGS.token_weights:
                count = tl.load(token_ptr + rows, mask=counted, other=0.0).to(ACC)
                if FLAGS.losses:  # a weight of 0 leaves out a NaN
                    loss = tl.where(count == 0.0, 0.0, loss * count)
            counts += count
            if FLAGS.lse_square and FLAGS.losses:
                # An ignored row is masked before the square: padding may hold anything.
                lse = tl.load(lse_ptr + rows, mask=counted, other=0.0).to(ACC)
                square = lse * lse
                if FLAGS.token_weights:
                    square = tl.where(count == 0.0, 0.0, square * count)
                squares += square
            if FLAGS.weights and not FLAGS.row_weights:
                valid = counted & (target >= 0) & (target < n_classes)
                weight = tl.load(weight_ptr + target, mask=valid, other=0.0)
                if FLAGS.token_weights:
                    weight *= count
                weights += weight
        if FLAGS.weights and FLAGS.row_weights:
            weights += tl.load(weight_ptr + rows, mask=inside, other=0.0)
        if FLAGS.losses:
            losses += loss
    loss = tl.sum(losses, axis=0)
    square = tl.sum(squares, axis=0)
    count = tl.sum(counts, axis=0)
    weight = tl.sum(weights, axis=0) if FLAGS.weights else count
    hits = tl.sum(all_hits, axis=0)
    number = tl.sum(numbers, axis=0)
    sums = (loss, square, weight, count, hits, number)
    if FLAGS.partial:
        for i in tl.static_range(6):
            tl.store(value_ptr + program + i * programs, sums[i])
    else:
        scale = tl.cast(lse_square_scale, ACC)
        pointers = (given_ptr, value_ptr, square_ptr, accuracy_ptr, divisor_ptr)
        weight, count = _store(sums, pointers, scale, FLAGS)
        if FLAGS.factors:
            for start in tl.range(0, n_rows, BLOCK):
                rows = start + tl.arange(0, BLOCK)
                inside = rows < n_rows
                target = tl.load(target_ptr + rows, mask=inside, other=0).to(tl.int64)
                token = tl.load(token_ptr + rows, mask=inside & (target != ignore_index), other=0.0).to(ACC)
                tl.store(value_ptr + rows, (1.0 / weight) * token, mask=inside)
                if FLAGS.lse_square:
                    tl.store(square_ptr + rows, scale * ((1.0 / count) * token), mask=inside)


@triton.jit
def _total(sums_ptr, part, exists):
    return tl.sum(tl.load(sums_ptr + part, mask=exists, other=0.0), axis=0)


@triton.jit(do_not_specialize=["n_parts"])
def join_sums_kernel(
    sums_ptr,  # (6, n_parts), as the programs of reduce_kernel left them
    given_ptr,  # as in reduce_kernel
    value_ptr,
    square_ptr,
    accuracy_ptr,
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
    hits = _total(sums_ptr + 4 * n_parts, part, exists) if FLAGS.hits else 0.0
    number = _total(sums_ptr + 5 * n_parts, part, exists) if FLAGS.hits else 0.0
    sums = (loss, square, weight, count, hits, number)
    pointers = (given_ptr, value_ptr, square_ptr, accuracy_ptr, divisor_ptr)
    scale = tl.cast(lse_square_scale, divisor_ptr.dtype.element_ty)
    _store(sums, pointers, scale, FLAGS)
