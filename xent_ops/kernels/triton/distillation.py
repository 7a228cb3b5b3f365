"""Student and teacher: statistics of a row, the divergence, its gradient.

The formulas are in reference_distillation.py.

There is one kernel; MODE selects its parts. A program has one row of the student and of the teacher:

    statistics      one pass over both: maximum and sum of each. If beta is 0 or 1, also the divergence, a sum of
                    differences weighted with the running softmax. For a beta between 0 and 1 the divergence needs a
                    second pass, because the mixture needs the statistics.
    gradient        one more pass, in reverse order: the L2 cache still has some of the last columns.

For a rank's slice of the classes, the statistics are of the slice. The passes for the mixture and for the gradient read
the statistics of all classes, which the caller has joined.
"""

import triton
import triton.language as tl

from .numerics import LN2, LOG2E, activate, activation_of, row_offset, scale_of, tanh_slope, without_infinity


@triton.jit
def _load(row_ptr, columns, inside, act, FLAGS: tl.constexpr, ACC: tl.constexpr, EVICTION: tl.constexpr):
    """x of a tile; -inf where there is no class."""
    z = tl.load(row_ptr + columns, mask=inside, other=0.0, eviction_policy=EVICTION).to(ACC)
    return tl.where(inside, activate(z, act, FLAGS), float("-inf"))


@triton.jit
def _moved(maximum, total, moment, other_maximum, pivot, other_pivot):
    """(total, moment) relative to other pivots. moment: the sum of e^(y - pivot) ((y - pivot) - (x - other_pivot))."""
    total_there = total * tl.exp2((maximum - pivot) * LOG2E)
    shift = (without_infinity(maximum) - pivot) - (without_infinity(other_maximum) - other_pivot)
    moment = (moment + total * shift) * tl.exp2((maximum - pivot) * LOG2E)
    return total_there, tl.where(total_there == 0.0, 0.0, moment)  # the moment may be infinite


@triton.jit
def _weighted(distance, other_distance, e):
    """A tile's part of a moment. A probability of 0 adds 0. If only the other probability is 0, it adds infinity."""
    return tl.sum(tl.where(e == 0.0, 0.0, e * (distance - other_distance)), axis=1)


@triton.jit
def _visit(state, x, y, temperature, MODE: tl.constexpr):
    """Fold a tile of the student's x and the teacher's y into the running sums of each lane.

    One maximum for each lane: threads exchange nothing inside the loop, as in forward.py.
    """
    maximum, total, teacher_maximum, teacher_total, moment, hard_total = state
    new_maximum = tl.maximum(maximum, tl.max(x, axis=1))
    new_teacher = tl.maximum(teacher_maximum, tl.max(y, axis=1))
    state = _relative_to(state, without_infinity(new_maximum), without_infinity(new_teacher), temperature, MODE)
    _, total, _, teacher_total, moment, hard_total = state
    distance = x - without_infinity(new_maximum)[:, None]
    teacher_distance = y - without_infinity(new_teacher)[:, None]
    e = tl.exp2(distance * LOG2E)
    teacher_e = tl.exp2(teacher_distance * LOG2E)
    if MODE.beta == 0:
        moment += _weighted(teacher_distance, distance, teacher_e)
    elif MODE.beta == 1:
        moment += _weighted(distance, teacher_distance, e)
    if MODE.hard == 2:
        hard_total += tl.sum(tl.exp2(distance * (temperature * LOG2E)), axis=1)
    total += tl.sum(e, axis=1)
    teacher_total += tl.sum(teacher_e, axis=1)
    return new_maximum, total, new_teacher, teacher_total, moment, hard_total


@triton.jit
def _relative_to(state, pivot, teacher_pivot, temperature, MODE: tl.constexpr):
    """The sums of a state relative to other, finite pivots; its maxima stay."""
    maximum, total, teacher_maximum, teacher_total, moment, hard_total = state
    if MODE.beta == 0:
        total *= tl.exp2((maximum - pivot) * LOG2E)
        teacher_total, moment = _moved(teacher_maximum, teacher_total, moment, maximum, teacher_pivot, pivot)
    elif MODE.beta == 1:
        teacher_total *= tl.exp2((teacher_maximum - teacher_pivot) * LOG2E)
        total, moment = _moved(maximum, total, moment, teacher_maximum, pivot, teacher_pivot)
    else:
        total *= tl.exp2((maximum - pivot) * LOG2E)
        teacher_total *= tl.exp2((teacher_maximum - teacher_pivot) * LOG2E)
    if MODE.hard == 2:
        hard_total *= tl.exp2((maximum - pivot) * (temperature * LOG2E))
    return maximum, total, teacher_maximum, teacher_total, moment, hard_total


@triton.jit
def _mixture(log_s, log_t, beta):
    """(s, t, log s - log m, log t - log m) of m = (1 - beta) s + beta t: undefined where s, or t, is 0."""
    higher = tl.maximum(log_s, log_t)
    ratio = tl.exp2(-tl.abs(log_s - log_t) * LOG2E)  # smaller / larger
    ratio = tl.where(higher == float("-inf"), 0.0, ratio)
    teacher_leads = log_t >= log_s
    share = tl.where(teacher_leads, beta + (1.0 - beta) * ratio, (1.0 - beta) + beta * ratio)
    log_m = higher + tl.log2(share) * LN2
    greater = tl.exp2(higher * LOG2E)
    s = greater * tl.where(teacher_leads, ratio, 1.0)
    t = greater * tl.where(teacher_leads, 1.0, ratio)
    return s, t, log_s - log_m, log_t - log_m


@triton.jit
def _divergences(log_s, log_t, beta):
    """A tile's parts of KL(s || m) and KL(t || m)."""
    s, t, s_over_m, t_over_m = _mixture(log_s, log_t, beta)
    student_kl = tl.sum(tl.where(s == 0.0, 0.0, s * s_over_m), axis=1)
    return student_kl, tl.sum(tl.where(t == 0.0, 0.0, t * t_over_m), axis=1)


@triton.jit
def _gradient(
    x, y, columns, a, lse, teacher_lse, student_kl, hard_lse, target, beta, temperature, hard_weight, act,
    FLAGS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of the student's logits."""
    log_s = x - lse
    log_t = y - teacher_lse
    s = tl.exp2(log_s * LOG2E)
    if MODE.beta == 0:
        grad = s - tl.exp2(log_t * LOG2E)
    else:
        if MODE.beta == 1:
            ratio = log_s - log_t
        else:
            s, _t, ratio, _t_over_m = _mixture(log_s, log_t, beta)
        distance = tl.where(ratio == float("inf"), float("inf"), ratio - student_kl)  # not inf - inf
        grad = tl.where(s == 0.0, 0.0, s * distance)
        if MODE.beta == 2:
            grad *= 1.0 - beta
    if MODE.hard != 0:
        p = s
        if MODE.hard == 2:
            p = tl.exp2((temperature * x - hard_lse) * LOG2E)
        grad += (hard_weight * temperature) * (p - tl.where(columns == target, 1.0, 0.0))
    grad *= a * scale_of(act)
    if FLAGS.softcap:
        grad *= tanh_slope(x, act)
    return grad


@triton.jit(
    do_not_specialize=["class_start", "n_classes", "ignore_index", "n_rows"],
    do_not_specialize_on_alignment=["n_inner", "n_teacher_inner", "n_out_inner"],
)
def distillation_kernel(
    logits_ptr,  # (outer, inner, width), rows of any stride
    teacher_ptr,  # (outer, inner, its width), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    upstream_ptr,  # (N,) with a stride, 0 for a scalar: multiplies the gradient
    loss_ptr,  # (N,)
    joined_ptr,  # (4, N): the statistics to read, if none are computed
    statistics_ptr,  # (4, N): see reference_distillation.py
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
    MODE: tl.constexpr,  # flags.DistillationFlags
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
    target = tl.load(target_ptr + row).to(tl.int64)
    live = target != ignore_index
    a = tl.cast(0.0, ACC)
    if MODE.gradient:
        a = tl.load(upstream_ptr + tl.cast(row, tl.int64) * upstream_stride).to(ACC)
    if not (MODE.statistics or MODE.divergence):
        live = live & (a != 0.0)  # a row without an upstream gradient is not read
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
    KEEP: tl.constexpr = "evict_last" if MODE.gradient or MODE.beta == 2 else ""
    zero = tl.cast(0.0, ACC)

    stats_ptr = statistics_ptr + row
    n_rows = tl.cast(n_rows, tl.int64)
    student_kl = zero
    loss = zero
    if MODE.statistics:
        zeros = tl.zeros([LANES], ACC)
        least = tl.full([LANES], float("-inf"), ACC)
        state = (least, zeros, least, zeros, zeros, zeros)
        for block in tl.range(0, n_blocks):
            columns = block * BLOCK + tile
            x = _load(row_ptr, columns, columns < body, act, FLAGS, ACC, KEEP)
            y = _load(teacher_row_ptr, columns, columns < body, teacher_act, TEACHER_FLAGS, ACC, KEEP)
            state = _visit(state, x, y, temperature, MODE)
        if RAGGED:
            columns = body + tile
            x = _load(row_ptr, columns, columns < n_read, act, FLAGS, ACC, KEEP)
            y = _load(teacher_row_ptr, columns, columns < n_read, teacher_act, TEACHER_FLAGS, ACC, KEEP)
            state = _visit(state, x, y, temperature, MODE)
        pivot = without_infinity(tl.max(state[0], axis=0))
        teacher_pivot = without_infinity(tl.max(state[2], axis=0))
        state = _relative_to(state, pivot, teacher_pivot, temperature, MODE)
        _, lanes_total, _, lanes_teacher, lanes_moment, lanes_hard = state
        total = tl.sum(lanes_total, axis=0)
        teacher_total = tl.sum(lanes_teacher, axis=0)
        log_total = tl.log2(total) * LN2
        teacher_log_total = tl.log2(teacher_total) * LN2
        lse = pivot + log_total
        teacher_lse = teacher_pivot + teacher_log_total
        hard_lse = lse
        if MODE.hard == 2:
            hard_lse = temperature * pivot + tl.log2(tl.sum(lanes_hard, axis=0)) * LN2
        if MODE.beta == 0:
            loss = tl.sum(lanes_moment, axis=0) / teacher_total - teacher_log_total + log_total
        elif MODE.beta == 1:
            loss = tl.sum(lanes_moment, axis=0) / total - log_total + teacher_log_total
            student_kl = loss
    else:
        lse = tl.load(joined_ptr + row)
        teacher_lse = tl.load(joined_ptr + row + n_rows)
        hard_lse = tl.load(joined_ptr + row + 3 * n_rows)
        if not MODE.divergence:
            student_kl = tl.load(joined_ptr + row + 2 * n_rows)
    if MODE.divergence:
        lanes_student_kl = tl.zeros([LANES], ACC)
        lanes_teacher_kl = tl.zeros([LANES], ACC)
        for block in tl.range(0, n_blocks):
            columns = (n_blocks - 1 - block) * BLOCK + tile  # the end of the row was read last
            x = _load(row_ptr, columns, columns < body, act, FLAGS, ACC, KEEP)
            y = _load(teacher_row_ptr, columns, columns < body, teacher_act, TEACHER_FLAGS, ACC, KEEP)
            added, teacher_added = _divergences(x - lse, y - teacher_lse, beta)
            lanes_student_kl += added
            lanes_teacher_kl += teacher_added
        if RAGGED:
            columns = body + tile
            x = _load(row_ptr, columns, columns < n_read, act, FLAGS, ACC, KEEP)
            y = _load(teacher_row_ptr, columns, columns < n_read, teacher_act, TEACHER_FLAGS, ACC, KEEP)
            added, teacher_added = _divergences(x - lse, y - teacher_lse, beta)
            lanes_student_kl += added
            lanes_teacher_kl += teacher_added
        student_kl = tl.sum(lanes_student_kl, axis=0)
        loss = beta * tl.sum(lanes_teacher_kl, axis=0) + (1.0 - beta) * student_kl
    if MODE.statistics or MODE.divergence:
        if MODE.hard != 0 and not MODE.part:
            at_target = tl.load(row_ptr + target, mask=valid & live, other=0.0).to(ACC)
            cross_entropy = hard_lse - temperature * activate(at_target, act, FLAGS)
            loss += hard_weight * tl.where(valid, cross_entropy, float("nan"))
        tl.store(loss_ptr + row, tl.where(live, loss, 0.0))
        if not MODE.gradient:
            tl.store(stats_ptr, lse)
            tl.store(stats_ptr + n_rows, teacher_lse)
            tl.store(stats_ptr + 2 * n_rows, tl.where(live, student_kl, 0.0))  # not 0 / 0
            tl.store(stats_ptr + 3 * n_rows, hard_lse)

    if MODE.gradient:
        out_ptr = grad_ptr + row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
        live = live & (a != 0.0)
        if MODE.hard != 0:
            a = tl.where(live & ~valid, float("nan"), a)
        n_read = tl.where(live, n_cols, 0)
        # The gradient may be written over the logits: no thread may begin before all have read the target's logit.
        tl.debug_barrier()
        body = n_cols // VECTOR * VECTOR
        n_blocks = tl.cdiv(body, BLOCK)
        for block in tl.range(0, n_blocks):
            if MODE.statistics and MODE.beta != 2:
                columns = (n_blocks - 1 - block) * BLOCK + tile
            else:
                columns = block * BLOCK + tile
            inside = columns < tl.where(live, body, 0)
            x = _load(row_ptr, columns, inside, act, FLAGS, ACC, "evict_first")
            y = _load(teacher_row_ptr, columns, inside, teacher_act, TEACHER_FLAGS, ACC, "evict_first")
            grad = _gradient(
                x, y, columns, a, lse, teacher_lse, student_kl, hard_lse, column, beta, temperature, hard_weight, act,
                FLAGS, MODE,
            )  # fmt: skip
            grad = tl.where(live, grad, 0.0)
            written = grad.to(grad_ptr.dtype.element_ty)
            tl.store(out_ptr + columns, written, mask=columns < body, eviction_policy="evict_first")
        if RAGGED:
            columns = body + tile
            x = _load(row_ptr, columns, columns < n_read, act, FLAGS, ACC, "")
            y = _load(teacher_row_ptr, columns, columns < n_read, teacher_act, TEACHER_FLAGS, ACC, "")
            grad = _gradient(
                x, y, columns, a, lse, teacher_lse, student_kl, hard_lse, column, beta, temperature, hard_weight, act,
                FLAGS, MODE,
            )  # fmt: skip
            grad = tl.where(live, grad, 0.0)
            tl.store(out_ptr + columns, grad.to(grad_ptr.dtype.element_ty), mask=columns < n_cols)
        if MODE.padded:
            for start in tl.range(n_cols, width, BLOCK):
                columns = start + tile
                tl.store(out_ptr + columns, tl.zeros_like(columns).to(grad_ptr.dtype.element_ty), mask=columns < width)
