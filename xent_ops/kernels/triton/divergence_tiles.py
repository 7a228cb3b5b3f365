"""The parts of divergences.py that compute one tile of a student's and a teacher's x."""

import triton
import triton.language as tl

from .numerics import LN2, LOG2E, activate, scale_of, tanh_slope, without_infinity


@triton.jit
def load_x(row_ptr, columns, inside, act, FLAGS: tl.constexpr, ACC: tl.constexpr, EVICTION: tl.constexpr):
    """x of a tile; -inf where there is no class."""
    z = tl.load(row_ptr + columns, mask=inside, other=0.0, eviction_policy=EVICTION).to(ACC)
    return tl.where(inside, activate(z, act, FLAGS), float("-inf"))


@triton.jit
def _weighted(distance, other_distance, e):
    """A tile's part of a moment. A probability of 0 adds 0. If only the other probability is 0, it adds infinity."""
    return tl.sum(tl.where(e == 0.0, 0.0, e * (distance - other_distance)), axis=1)


@triton.jit
def _moved(maximum, total, moment, other_maximum, pivot, other_pivot):
    """A moment relative to other pivots: the sum of e^(y - pivot) ((y - pivot) - (x - other_pivot))."""
    scale = tl.exp2((maximum - pivot) * LOG2E)
    shift = (without_infinity(maximum) - pivot) - (without_infinity(other_maximum) - other_pivot)
    return tl.where(total * scale == 0.0, 0.0, (moment + total * shift) * scale)  # the moment may be infinite


@triton.jit
def relative_to(state, pivot, teacher_pivot, temperature, MODE: tl.constexpr):
    """The sums of a state relative to other, finite pivots; its maxima stay."""
    maximum, total, teacher_maximum, teacher_total, kl, reverse_kl, hard_total = state
    if MODE.kl:
        kl = _moved(teacher_maximum, teacher_total, kl, maximum, teacher_pivot, pivot)
    if MODE.reverse_kl:
        reverse_kl = _moved(maximum, total, reverse_kl, teacher_maximum, pivot, teacher_pivot)
    total *= tl.exp2((maximum - pivot) * LOG2E)
    teacher_total *= tl.exp2((teacher_maximum - teacher_pivot) * LOG2E)
    if MODE.hard == 2:
        hard_total *= tl.exp2((maximum - pivot) * (temperature * LOG2E))
    return maximum, total, teacher_maximum, teacher_total, kl, reverse_kl, hard_total


@triton.jit
def visit(state, x, y, temperature, MODE: tl.constexpr):
    """Fold a tile of the student's x and the teacher's y into the running sums of each lane.

    One maximum for each lane: threads exchange nothing inside the loop, as in forward.py.
    """
    new_maximum = tl.maximum(state[0], tl.max(x, axis=1))
    new_teacher = tl.maximum(state[2], tl.max(y, axis=1))
    state = relative_to(state, without_infinity(new_maximum), without_infinity(new_teacher), temperature, MODE)
    _, total, _, teacher_total, kl, reverse_kl, hard_total = state
    distance = x - without_infinity(new_maximum)[:, None]
    teacher_distance = y - without_infinity(new_teacher)[:, None]
    e = tl.exp2(distance * LOG2E)
    teacher_e = tl.exp2(teacher_distance * LOG2E)
    if MODE.kl:
        kl += _weighted(teacher_distance, distance, teacher_e)
    if MODE.reverse_kl:
        reverse_kl += _weighted(distance, teacher_distance, e)
    if MODE.hard == 2:
        hard_total += tl.sum(tl.exp2(distance * (temperature * LOG2E)), axis=1)
    total += tl.sum(e, axis=1)
    teacher_total += tl.sum(teacher_e, axis=1)
    return new_maximum, total, new_teacher, teacher_total, kl, reverse_kl, hard_total


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
def visit_again(sums, x, y, lses, lows, beta, MODE: tl.constexpr):
    """Add a tile's parts of KL(s || m), KL(t || m), the overlap and the lower mass."""
    student_kl, teacher_kl, overlap, lower_mass = sums
    lse, teacher_lse, _hard_lse, lse_all = lses
    low, teacher_low, _hard_low, low_all = lows
    log_s = (x - lse) - low
    if MODE.mixture:
        s, t, s_over_m, t_over_m = _mixture(log_s, (y - teacher_lse) - teacher_low, beta)
        student_kl += tl.sum(tl.where(s == 0.0, 0.0, s * s_over_m), axis=1)
        teacher_kl += tl.sum(tl.where(t == 0.0, 0.0, t * t_over_m), axis=1)
    if MODE.overlap:
        log_t = (y - lse_all) - low_all
        s = tl.exp2(log_s * LOG2E)
        below = log_s <= log_t
        overlap += tl.sum(tl.where(below, s, tl.exp2(log_t * LOG2E)), axis=1)
        lower_mass += tl.sum(tl.where(below, s, 0.0), axis=1)
    return student_kl, teacher_kl, overlap, lower_mass


@triton.jit
def _coefficient(upstream_ptr, WANTED: tl.constexpr, ACC: tl.constexpr):
    value = tl.cast(0.0, ACC)
    if WANTED:
        value = tl.load(upstream_ptr).to(ACC)
    return value


@triton.jit
def coefficients_of(upstream_ptr, stride, hard_weight, MODE: tl.constexpr, ACC: tl.constexpr):
    """Those of a row's values. With MODE.fixed of a loss: one of them, plus hard_weight times a cross entropy."""
    of_log_prob = _coefficient(upstream_ptr + 4 * stride, MODE.hard != 0, ACC)
    if MODE.fixed:
        of_log_prob *= -hard_weight
    return (
        _coefficient(upstream_ptr, MODE.kl, ACC),
        _coefficient(upstream_ptr + stride, MODE.reverse_kl, ACC),
        _coefficient(upstream_ptr + 2 * stride, MODE.mixture, ACC),
        _coefficient(upstream_ptr + 3 * stride, MODE.overlap, ACC),
        of_log_prob,
    )


@triton.jit
def any_of(coefficients):
    of_kl, of_reverse, of_mixture, of_overlap, of_log_prob = coefficients
    return (of_kl != 0.0) | (of_reverse != 0.0) | (of_mixture != 0.0) | (of_overlap != 0.0) | (of_log_prob != 0.0)


@triton.jit
def _part(coefficient, term, MODE: tl.constexpr):
    """A row without this gradient gets exact zeros, even where the term is not finite. A fixed loss writes them."""
    part = coefficient * term
    if not MODE.fixed:
        part = tl.where(coefficient == 0.0, 0.0, part)
    return part


@triton.jit
def _of_divergence(s, ratio, kl):
    distance = tl.where(ratio == float("inf"), float("inf"), ratio - kl)  # not inf - inf
    return tl.where(s == 0.0, 0.0, s * distance)


@triton.jit
def gradient_of(
    x, y, columns, coefficients, statistics, lows, target, valid, beta, temperature, act,
    FLAGS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of the student's logits."""
    of_kl, of_reverse, of_mixture, of_overlap, of_log_prob = coefficients
    lse, teacher_lse, reverse_kl, student_kl, lower_mass, hard_lse, lse_all = statistics
    low, teacher_low, hard_low, low_all = lows
    log_s = (x - lse) - low
    log_t = (y - teacher_lse) - teacher_low
    s = tl.exp2(log_s * LOG2E)
    grad = tl.zeros_like(x)
    if MODE.kl:
        grad += _part(of_kl, s - tl.exp2(log_t * LOG2E), MODE)
    if MODE.reverse_kl:
        grad += _part(of_reverse, _of_divergence(s, log_s - log_t, reverse_kl), MODE)
    if MODE.mixture:
        s_there, _t, ratio, _t_over_m = _mixture(log_s, log_t, beta)
        grad += _part(of_mixture * (1.0 - beta), _of_divergence(s_there, ratio, student_kl), MODE)
    if MODE.overlap:
        grad += _part(of_overlap, s * (tl.where(log_s <= (y - lse_all) - low_all, 1.0, 0.0) - lower_mass), MODE)
    if MODE.hard != 0:
        p = s
        if MODE.hard == 2:
            p = tl.exp2(((temperature * x - hard_lse) - hard_low) * LOG2E)
        hot = tl.where(columns == target, 1.0, 0.0)
        grad += _part(of_log_prob * temperature, tl.where(valid, hot - p, float("nan")), MODE)
    grad *= scale_of(act)
    if FLAGS.softcap:
        grad *= tanh_slope(x, act)
    return grad
