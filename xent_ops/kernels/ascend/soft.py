"""Class probabilities as targets: loss = sum_j w_j q_j (lse - x_j), q = (1-e) p + e/V."""

import triton
import triton.language as tl

from ..triton.numerics import row_offset, without_infinity
from .backward import write_zeros
from .forward import activate


@triton.jit
def _weighted(p, pointers, exists, label_smoothing, n_cols, HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr):
    """w_j q_j of a tile. Beyond ``exists`` it is 0 if there are weights, or no smoothing."""
    q = p.to(tl.float32)
    if HAS_SMOOTHING:
        q = q * (1.0 - label_smoothing) + label_smoothing / n_cols
    if HAS_WEIGHT:
        q *= tl.load(pointers, mask=exists, other=0.0)
    return q


@triton.jit
def _mass(total, label_smoothing, HAS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr):
    """The sum of w_j q_j of a row. ``total``: that sum, or the sum of p_j if there are no weights."""
    if HAS_SMOOTHING and not HAS_WEIGHT:
        total = total * (1.0 - label_smoothing) + label_smoothing
    return total


@triton.jit(
    do_not_specialize=["n_rows", "chunk", "n_inner", "n_target_inner", "label_smoothing", "softcap", "logit_scale"]
)
def soft_forward_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (outer, inner, V), rows of any stride
    weight_ptr,  # (V,) float32
    loss_ptr,  # (N,) float32
    lse_ptr,  # (N,) float32
    n_rows,
    chunk,  # rows of a program
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    n_target_inner,
    target_stride_outer,
    target_stride_inner,
    label_smoothing,
    softcap,
    logit_scale,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,  # logit_scale is not 1
    SOFTCAP: tl.constexpr,  # see softcap of triton/configs.py
    BLOCK: tl.constexpr,
):
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    columns = tl.arange(0, BLOCK)
    lane = columns.to(tl.float32)
    for row in tl.range(begin, end):
        row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
        target_row_ptr = target_ptr + row_offset(row, n_target_inner, target_stride_outer, target_stride_inner)
        maximum = tl.cast(float("-inf"), tl.float32)
        total = tl.cast(0.0, tl.float32)
        mass = tl.cast(0.0, tl.float32)  # sum of w q
        moment = tl.cast(0.0, tl.float32)  # sum of w q (x - maximum)
        for start in tl.range(0, n_cols, BLOCK):
            exists = columns < n_cols - start
            inside = lane < (n_cols - start).to(tl.float32)
            z = tl.load(row_ptr + start + columns, mask=exists, other=0.0)
            p = tl.load(target_row_ptr + start + columns, mask=exists, other=0.0)
            x = activate(z.to(tl.float32), logit_scale, softcap, HAS_SCALE, SOFTCAP)
            x = tl.where(inside, x, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
            pivot = without_infinity(new_maximum)
            distance = x - pivot
            total = total * tl.exp(maximum - pivot) + tl.sum(tl.exp(distance), axis=0)
            q = _weighted(p, weight_ptr + start + columns, exists, label_smoothing, n_cols, HAS_WEIGHT, HAS_SMOOTHING)
            moment += (without_infinity(maximum) - pivot) * mass
            moment += tl.sum(tl.where(inside, q * distance, 0.0), axis=0)
            mass += tl.sum(tl.where(inside, q, 0.0), axis=0)
            maximum = new_maximum
        pivot = without_infinity(maximum)
        log_total = tl.log(total)
        tl.store(loss_ptr + row, mass * log_total - moment)
        tl.store(lse_ptr + row, pivot + log_total)


@triton.jit(
    do_not_specialize=[
        "n_rows", "chunk", "n_inner", "n_target_inner", "label_smoothing", "softcap", "logit_scale",
    ]
)  # fmt: skip
def soft_backward_kernel(
    grad_loss_ptr,  # (N,) with a stride, 0 for an expanded scalar
    grad_lse_ptr,  # (N,) with a stride, 0 for an expanded scalar
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (outer, inner, V), rows of any stride
    lse_ptr,  # (N,) float32
    weight_ptr,  # (V,) float32
    grad_ptr,  # (N, V), contiguous
    n_rows,
    chunk,  # rows of a program
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    n_target_inner,
    target_stride_outer,
    target_stride_inner,
    grad_loss_stride,
    grad_lse_stride,
    label_smoothing,
    softcap,
    logit_scale,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,  # logit_scale is not 1
    SOFTCAP: tl.constexpr,  # see softcap of triton/configs.py
    BLOCK: tl.constexpr,
):
    """First the mass of a row's target, then its gradient (a mass + b) softmax_j - a w_j q_j."""
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    columns = tl.arange(0, BLOCK)
    for row in tl.range(begin, end):
        row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
        target_row_ptr = target_ptr + row_offset(row, n_target_inner, target_stride_outer, target_stride_inner)
        row_index = tl.cast(row, tl.int64)
        grad_row_ptr = grad_ptr + row_index * n_cols
        lse = tl.load(lse_ptr + row)
        a = tl.load(grad_loss_ptr + row_index * grad_loss_stride).to(tl.float32)
        n_read = tl.where(a != 0.0, n_cols, 0)  # without an upstream gradient, probabilities may hold any value
        total = tl.cast(0.0, tl.float32)
        for start in tl.range(0, n_read, BLOCK):
            exists = columns < n_read - start
            p = tl.load(target_row_ptr + start + columns, mask=exists, other=0.0)
            q = _weighted(
                p, weight_ptr + start + columns, exists, label_smoothing, n_cols, HAS_WEIGHT,
                HAS_SMOOTHING and HAS_WEIGHT,
            )  # fmt: skip
            total += tl.sum(q, axis=0)
        total = a * _mass(total, label_smoothing, HAS_WEIGHT, HAS_SMOOTHING)
        if HAS_GRAD_LSE:
            total += tl.load(grad_lse_ptr + row_index * grad_lse_stride).to(tl.float32)
        if (total != 0.0) | (a != 0.0):
            total *= logit_scale
            a *= logit_scale
            for start in tl.range(0, n_cols, BLOCK):
                exists = columns < n_cols - start
                z = tl.load(row_ptr + start + columns, mask=exists, other=0.0)
                x = activate(z.to(tl.float32), logit_scale, softcap, HAS_SCALE, SOFTCAP)
                grad = total * tl.exp(x - lse)
                read = columns < n_read - start
                p = tl.load(target_row_ptr + start + columns, mask=read, other=0.0)
                grad -= a * _weighted(
                    p, weight_ptr + start + columns, read, label_smoothing, n_cols, HAS_WEIGHT, HAS_SMOOTHING
                )
                if SOFTCAP != 0:
                    ratio = x * (1.0 / softcap)
                    grad *= 1.0 - ratio * ratio
                tl.store(grad_row_ptr + start + columns, grad.to(grad_ptr.dtype.element_ty), mask=exists)
        else:
            write_zeros(grad_row_ptr, n_cols, BLOCK)
