"""Class probabilities as targets: loss = sum_j w_j q_j (lse - x_j), q = (1-e) p + e/V."""

import triton
import triton.language as tl

from .numerics import LN2, LOG2E, activate, activation_of, row_offset, scale_of, tanh_slope, without_infinity


@triton.jit
def _probabilities(
    target_ptr, weight_ptr, columns, inside, label_smoothing, n_cols, ACC: tl.constexpr, FLAGS: tl.constexpr
):
    """w_j q_j, 0 beyond the row."""
    q = tl.load(target_ptr + columns, mask=inside, other=0.0).to(ACC)
    q = q * (1.0 - label_smoothing) + label_smoothing / n_cols
    if FLAGS.weight:
        q *= tl.load(weight_ptr + columns, mask=inside, other=0.0)
    return tl.where(inside, q, 0.0)


@triton.jit(
    do_not_specialize_on_alignment=["n_inner", "n_target_inner"],
)
def soft_forward_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (outer, inner, V), rows of any stride
    weight_ptr,  # (V,) in the accumulator's dtype
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    n_target_inner,
    target_stride_outer,
    target_stride_inner,
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    ACC: tl.constexpr = loss_ptr.dtype.element_ty
    row = tl.program_id(0)
    row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    target_row_ptr = target_ptr + row_offset(row, n_target_inner, target_stride_outer, target_stride_inner)
    label_smoothing = tl.cast(label_smoothing, ACC)
    act = activation_of(softcap, logit_scale, ACC)

    maximum = tl.cast(float("-inf"), ACC)
    total = tl.zeros([BLOCK], ACC)
    mass = tl.zeros([BLOCK], ACC)  # sum of w q
    moment = tl.zeros([BLOCK], ACC)  # sum of w q (x - pivot)
    for start in tl.range(0, n_cols, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < n_cols
        z = tl.load(row_ptr + columns, mask=inside, other=0.0).to(ACC)
        x = activate(z, act, FLAGS)
        q = _probabilities(target_row_ptr, weight_ptr, columns, inside, label_smoothing, n_cols, ACC, FLAGS)
        new_maximum = tl.maximum(maximum, tl.max(tl.where(inside, x, float("-inf")), axis=0))
        pivot = without_infinity(new_maximum)
        moment += (without_infinity(maximum) - pivot) * mass
        moment += tl.where(inside, q * (x - pivot), 0.0)
        mass += q
        total = total * tl.exp2((maximum - pivot) * LOG2E)
        total += tl.where(inside, tl.exp2((x - pivot) * LOG2E), 0.0)
        maximum = new_maximum
    pivot = without_infinity(maximum)
    log_total = tl.log2(tl.sum(total, axis=0)) * LN2
    tl.store(loss_ptr + row, tl.sum(mass, axis=0) * log_total - tl.sum(moment, axis=0))
    tl.store(lse_ptr + row, pivot + log_total)


@triton.jit(
    do_not_specialize_on_alignment=["n_inner", "n_target_inner"],
)
def soft_backward_kernel(
    grad_loss_ptr,  # (N,) with a stride, 0 for an expanded scalar
    grad_lse_ptr,  # (N,) with a stride
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (outer, inner, V), rows of any stride
    lse_ptr,  # (N,)
    weight_ptr,  # (V,) in the accumulator's dtype
    grad_ptr,  # (N, V), contiguous
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    n_target_inner,
    target_stride_outer,
    target_stride_inner,
    grad_loss_stride,
    grad_lse_stride,
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: the mass of the target first, then the gradient (the second read comes from L2)."""
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    row = tl.cast(tl.program_id(0), tl.int64)
    row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    target_row_ptr = target_ptr + row_offset(row, n_target_inner, target_stride_outer, target_stride_inner)
    label_smoothing = tl.cast(label_smoothing, ACC)
    act = activation_of(softcap, logit_scale, ACC)

    a = tl.load(grad_loss_ptr + row * grad_loss_stride).to(ACC)
    n_read = tl.where(a != 0.0, n_cols, 0)  # without an upstream gradient, probabilities may be anything
    mass = tl.zeros([BLOCK], ACC)
    for start in tl.range(0, n_read, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        read = columns < n_read
        mass += _probabilities(target_row_ptr, weight_ptr, columns, read, label_smoothing, n_cols, ACC, FLAGS)
    total = a * tl.sum(mass, axis=0)
    if FLAGS.grad_lse:
        total += tl.load(grad_lse_ptr + row * grad_lse_stride).to(ACC)
    live = (total != 0.0) | (a != 0.0)
    lse = tl.load(lse_ptr + row)
    for start in tl.range(0, n_cols, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < n_cols
        z = tl.load(row_ptr + columns, mask=columns < tl.where(live, n_cols, 0), other=0.0).to(ACC)
        x = activate(z, act, FLAGS)
        read = columns < n_read
        q = _probabilities(target_row_ptr, weight_ptr, columns, read, label_smoothing, n_cols, ACC, FLAGS)
        grad = total * tl.exp2((x - lse) * LOG2E) - a * q
        if FLAGS.softcap:
            grad *= tanh_slope(x, act)
        grad = tl.where(live, grad * scale_of(act), 0.0)
        tl.store(grad_ptr + row * n_cols + columns, grad.to(grad_ptr.dtype.element_ty), mask=inside)
