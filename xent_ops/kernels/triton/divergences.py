"""Student and teacher: statistics of a row, its divergences, the gradient from a coefficient of each.

The formulas are in reference_divergences.py.

There is one kernel; MODE selects its parts. A program has one row of the student and of the teacher:

    statistics      one pass over both: maximum and sum of each. KL(t || s) and KL(s || t) are sums of differences
                    weighted with the running softmax.
    again           the mixture and the overlap need the statistics, and so a second pass.
    gradient        one more pass, in reverse order: the L2 cache still has some of the last columns.

For a rank's slice of the classes, the statistics are of the slice. The passes for the sums and for the gradient read
the statistics of all classes, which the caller has joined.
"""

import triton
import triton.language as tl

from .divergence_tiles import any_of, coefficients_of, gradient_of, load_x, relative_to, visit, visit_again
from .numerics import LN2, activate, activation_of, row_offset, split_lse, without_infinity


@triton.jit(
    do_not_specialize=["class_start", "n_classes", "ignore_index", "n_rows"],
    do_not_specialize_on_alignment=["n_inner", "n_teacher_inner", "n_out_inner"],
)
def divergences_kernel(
    logits_ptr,  # (outer, inner, width), rows of any stride
    teacher_ptr,  # (outer, inner, its width), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    lse_all_ptr,  # (2, N): of the teacher's probabilities in the overlap, and its lse_low, if MODE.other
    upstream_ptr,  # (5, N): the gradients of the values; MODE.fixed: (N,) with a stride, 0 for a scalar, of the loss
    values_ptr,  # (5, N); MODE.fixed: (N,), the loss
    joined_ptr,  # (11, N): the statistics to read, if none are computed
    statistics_ptr,  # (11, N): see reference_divergences.py
    grad_ptr,  # (outer, inner, width): may be the logits themselves
    n_rows: "i64",
    n_cols,  # classes
    width,
    n_inner,
    stride_outer,
    stride_inner,
    n_teacher_inner,
    teacher_stride_outer,
    teacher_stride_inner,
    n_out_inner,
    out_stride_outer,
    out_stride_inner,
    upstream_stride,
    class_start: "i64",  # for a slice: the class of the first column
    n_classes: "i64",  # for a slice: of all slices together
    ignore_index: "i64",
    beta: "fp64",
    temperature: "fp64",
    hard_weight: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    teacher_softcap: "fp64",
    teacher_logit_scale: "fp64",
    FLAGS: tl.constexpr,
    TEACHER_FLAGS: tl.constexpr,
    MODE: tl.constexpr,  # flags.DivergenceFlags
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,  # elements of a lane
):
    ACC: tl.constexpr = statistics_ptr.dtype.element_ty
    LANES: tl.constexpr = BLOCK // VECTOR
    row = tl.program_id(0)
    row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    teacher_row_ptr = teacher_ptr + row_offset(row, n_teacher_inner, teacher_stride_outer, teacher_stride_inner)
    act = activation_of(softcap, logit_scale, ACC)
    teacher_act = activation_of(teacher_softcap, teacher_logit_scale, ACC)
    beta = tl.cast(beta, ACC)
    temperature = tl.cast(temperature, ACC)
    hard_weight = tl.cast(hard_weight, ACC)
    n_rows = tl.cast(n_rows, tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    live = target != ignore_index
    zero = tl.cast(0.0, ACC)
    coefficients = (zero, zero, zero, zero, zero)
    if MODE.gradient:
        of_row_ptr = upstream_ptr + tl.cast(row, tl.int64) * upstream_stride
        stride = n_rows
        if MODE.fixed:
            stride = tl.cast(0, tl.int64)
        coefficients = coefficients_of(of_row_ptr, stride, hard_weight, MODE, ACC)
    is_passed = any_of(coefficients)
    if not (MODE.statistics or MODE.again):
        live = live & is_passed  # a row without an upstream gradient is not read
    total_classes = tl.cast(n_cols, tl.int64)
    column = target
    if MODE.part:
        total_classes = n_classes
        column = target - class_start
    valid = (target >= 0) & (target < total_classes)
    tile = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    n_read = tl.where(live, n_cols, 0)
    body = n_read // VECTOR * VECTOR  # whole lanes: this mask can be vectorised for any n_cols
    n_blocks = tl.cdiv(body, BLOCK)
    RAGGED: tl.constexpr = MODE.ragged  # n_cols is not a multiple of VECTOR
    KEEP: tl.constexpr = "evict_last" if MODE.gradient or MODE.mixture or MODE.overlap else ""

    kl = zero
    reverse_kl = zero
    student_kl = zero
    lower_mass = zero
    if MODE.statistics:
        zeros = tl.zeros([LANES], ACC)
        least = tl.full([LANES], float("-inf"), ACC)
        state = (least, zeros, least, zeros, zeros, zeros, zeros)
        for block in tl.range(0, n_blocks):
            columns = block * BLOCK + tile
            x = load_x(row_ptr, columns, columns < body, act, FLAGS, ACC, KEEP)
            y = load_x(teacher_row_ptr, columns, columns < body, teacher_act, TEACHER_FLAGS, ACC, KEEP)
            state = visit(state, x, y, temperature, MODE)
        if RAGGED:
            columns = body + tile
            x = load_x(row_ptr, columns, columns < n_read, act, FLAGS, ACC, KEEP)
            y = load_x(teacher_row_ptr, columns, columns < n_read, teacher_act, TEACHER_FLAGS, ACC, KEEP)
            state = visit(state, x, y, temperature, MODE)
        pivot = without_infinity(tl.max(state[0], axis=0))
        teacher_pivot = without_infinity(tl.max(state[2], axis=0))
        state = relative_to(state, pivot, teacher_pivot, temperature, MODE)
        _, lanes_total, _, lanes_teacher, lanes_kl, lanes_reverse, lanes_hard = state
        total = tl.sum(lanes_total, axis=0)
        teacher_total = tl.sum(lanes_teacher, axis=0)
        log_total = tl.log2(total) * LN2
        teacher_log_total = tl.log2(teacher_total) * LN2
        lse, low = split_lse(pivot, log_total)
        teacher_lse, teacher_low = split_lse(teacher_pivot, teacher_log_total)
        hard_lse = lse
        hard_low = low
        if MODE.hard == 2:
            hard_lse, hard_low = split_lse(temperature * pivot, tl.log2(tl.sum(lanes_hard, axis=0)) * LN2)
        if MODE.kl:
            kl = tl.sum(lanes_kl, axis=0) / teacher_total - teacher_log_total + log_total
        if MODE.reverse_kl:
            reverse_kl = tl.sum(lanes_reverse, axis=0) / total - log_total + teacher_log_total
        lse_all = teacher_lse
        low_all = teacher_low
        if MODE.other:
            lse_all = tl.load(lse_all_ptr + row).to(ACC)
            low_all = tl.load(lse_all_ptr + n_rows + row).to(ACC)
    else:
        lse = tl.load(joined_ptr + row)
        teacher_lse = tl.load(joined_ptr + n_rows + row)
        reverse_kl = tl.load(joined_ptr + 2 * n_rows + row)
        student_kl = tl.load(joined_ptr + 3 * n_rows + row)
        lower_mass = tl.load(joined_ptr + 4 * n_rows + row)
        hard_lse = tl.load(joined_ptr + 5 * n_rows + row)
        lse_all = tl.load(joined_ptr + 6 * n_rows + row)
        low = tl.load(joined_ptr + 7 * n_rows + row)
        teacher_low = tl.load(joined_ptr + 8 * n_rows + row)
        hard_low = tl.load(joined_ptr + 9 * n_rows + row)
        low_all = tl.load(joined_ptr + 10 * n_rows + row)
    lows = (low, teacher_low, hard_low, low_all)  # log s_j = (x_j - lse) - low
    mixture = zero
    overlap = zero
    if MODE.again:
        zeros = tl.zeros([LANES], ACC)
        sums = (zeros, zeros, zeros, zeros)
        lses = (lse, teacher_lse, hard_lse, lse_all)
        for block in tl.range(0, n_blocks):
            columns = (n_blocks - 1 - block) * BLOCK + tile  # the end of the row was read last
            x = load_x(row_ptr, columns, columns < body, act, FLAGS, ACC, KEEP)
            y = load_x(teacher_row_ptr, columns, columns < body, teacher_act, TEACHER_FLAGS, ACC, KEEP)
            sums = visit_again(sums, x, y, lses, lows, beta, MODE)
        if RAGGED:
            columns = body + tile
            x = load_x(row_ptr, columns, columns < n_read, act, FLAGS, ACC, KEEP)
            y = load_x(teacher_row_ptr, columns, columns < n_read, teacher_act, TEACHER_FLAGS, ACC, KEEP)
            sums = visit_again(sums, x, y, lses, lows, beta, MODE)
        student_kl = tl.sum(sums[0], axis=0)
        mixture = beta * tl.sum(sums[1], axis=0) + (1.0 - beta) * student_kl
        overlap = tl.sum(sums[2], axis=0)
        lower_mass = tl.sum(sums[3], axis=0)
    if MODE.statistics or MODE.again:
        log_prob = zero
        if MODE.hard != 0 and not MODE.part:
            at_target = tl.load(row_ptr + target, mask=valid & live, other=0.0).to(ACC)
            log_prob = (temperature * activate(at_target, act, FLAGS) - hard_lse) - hard_low
            log_prob = tl.where(valid, log_prob, float("nan"))
        if MODE.fixed:
            tl.store(values_ptr + row, tl.where(live, kl + reverse_kl + mixture - hard_weight * log_prob, 0.0))
        else:
            values = (kl, reverse_kl, mixture, overlap, log_prob)
            for i in tl.static_range(5):
                tl.store(values_ptr + i * n_rows + row, tl.where(live, values[i], 0.0))  # not 0 / 0
        if not MODE.gradient:
            statistics = (lse, teacher_lse, reverse_kl, student_kl, lower_mass, hard_lse, lse_all)
            for i in tl.static_range(7):
                tl.store(statistics_ptr + i * n_rows + row, tl.where(live, statistics[i], 0.0))
            for i in tl.static_range(4):
                tl.store(statistics_ptr + (7 + i) * n_rows + row, tl.where(live, lows[i], 0.0))

    if MODE.gradient:
        out_ptr = grad_ptr + row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
        live = live & is_passed
        statistics = (lse, teacher_lse, reverse_kl, student_kl, lower_mass, hard_lse, lse_all)
        n_read = tl.where(live, n_cols, 0)
        # The gradient may be written over the logits: no thread may begin before all have read the target's logit.
        tl.debug_barrier()
        body = n_cols // VECTOR * VECTOR
        n_blocks = tl.cdiv(body, BLOCK)
        for block in tl.range(0, n_blocks):
            if MODE.statistics and not MODE.again and not MODE.narrow:
                columns = (n_blocks - 1 - block) * BLOCK + tile
            else:
                columns = block * BLOCK + tile
            inside = columns < tl.where(live, body, 0)
            x = load_x(row_ptr, columns, inside, act, FLAGS, ACC, "evict_first")
            y = load_x(teacher_row_ptr, columns, inside, teacher_act, TEACHER_FLAGS, ACC, "evict_first")
            grad = gradient_of(
                x, y, columns, coefficients, statistics, lows, column, valid, beta, temperature, act, FLAGS, MODE
            )
            written = tl.where(live, grad, 0.0).to(grad_ptr.dtype.element_ty)
            if MODE.narrow:
                tl.debug_barrier()  # all threads have read this tile; the gradient is written to it or before it
            tl.store(out_ptr + columns, written, mask=columns < body, eviction_policy="evict_first")
        if RAGGED:
            columns = body + tile
            x = load_x(row_ptr, columns, columns < n_read, act, FLAGS, ACC, "")
            y = load_x(teacher_row_ptr, columns, columns < n_read, teacher_act, TEACHER_FLAGS, ACC, "")
            grad = gradient_of(
                x, y, columns, coefficients, statistics, lows, column, valid, beta, temperature, act, FLAGS, MODE
            )
            written = tl.where(live, grad, 0.0).to(grad_ptr.dtype.element_ty)
            if MODE.narrow:
                tl.debug_barrier()  # all threads have read this tile; the gradient is written to it or before it
            tl.store(out_ptr + columns, written, mask=columns < n_cols)
        if MODE.padded:
            for start in tl.range(n_cols, width, BLOCK):
                columns = start + tile
                tl.store(out_ptr + columns, tl.zeros_like(columns).to(grad_ptr.dtype.element_ty), mask=columns < width)
