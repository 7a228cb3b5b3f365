"""The gradient of the row operator: each element read once and written once."""

import triton
import triton.language as tl

from ..triton.numerics import activate, row_offset


@triton.jit
def _write_zeros(grad_row_ptr, columns, n_cols, BLOCK: tl.constexpr):
    """The gradient of a row that passes nothing back, whatever its logits hold."""
    zeros = tl.zeros([BLOCK], grad_row_ptr.dtype.element_ty)
    for start in tl.range(0, n_cols, BLOCK):
        tl.store(grad_row_ptr + start + columns, zeros, mask=columns < n_cols - start)


@triton.jit
def _write_light(pointers, grad_pointers, lane, left, target, lse, scaled, logit_scale, MASKED: tl.constexpr):
    """A tile of a (softmax - one_hot); ``scaled`` is a * logit_scale. The other arguments are those of _write."""
    if MASKED:
        exists = tl.arange(0, pointers.shape[0]) < left
        z = tl.load(pointers, mask=exists, other=0.0)
    else:
        z = tl.load(pointers)
    grad = scaled * tl.exp(z.to(tl.float32) * logit_scale - lse)
    grad = tl.where(lane == target, grad - scaled, grad)
    if MASKED:
        tl.store(grad_pointers, grad.to(grad_pointers.dtype.element_ty), mask=exists)
    else:
        tl.store(grad_pointers, grad.to(grad_pointers.dtype.element_ty))


@triton.jit(do_not_specialize=["n_rows", "chunk", "n_inner", "n_out_inner", "ignore_index", "logit_scale"])
def light_backward_kernel(
    grad_loss_ptr,  # (N,) with a stride, 0 for an expanded scalar
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, int64 or int32
    lse_ptr,  # (N,) float32
    grad_ptr,  # (outer, inner, V): may be the logits themselves
    n_rows,
    chunk,  # rows of a program
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    n_out_inner,
    out_stride_outer,
    out_stride_inner,
    grad_loss_stride,
    ignore_index,
    logit_scale,
    BLOCK: tl.constexpr,
):
    """a (softmax - one_hot): without weight, smoothing, softcap, or a gradient of the lse or the entropy.

    Beside the general kernel a multiplication an element less, and little to compute before a row.
    """
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    columns = tl.arange(0, BLOCK)
    lane = columns.to(tl.float32)
    n_full = n_cols // BLOCK * BLOCK
    for row in tl.range(begin, end):
        row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
        grad_row_ptr = grad_ptr + row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
        target = tl.load(target_ptr + row).to(tl.int64)
        lse = tl.load(lse_ptr + row)
        a = tl.load(grad_loss_ptr + tl.cast(row, tl.int64) * grad_loss_stride).to(tl.float32)
        a = tl.where((target >= 0) & (target < n_cols), a, float("nan"))
        a = tl.where(target == ignore_index, 0.0, a)
        if a != 0.0:
            scaled = a * logit_scale
            for start in tl.range(0, n_full, BLOCK):
                _write_light(
                    row_ptr + start + columns, grad_row_ptr + start + columns, lane, n_cols,
                    (target - start).to(tl.float32), lse, scaled, logit_scale, False,
                )  # fmt: skip
            if n_full < n_cols:
                _write_light(
                    row_ptr + n_full + columns, grad_row_ptr + n_full + columns, lane, n_cols - n_full,
                    (target - n_full).to(tl.float32), lse, scaled, logit_scale, True,
                )  # fmt: skip
        else:
            _write_zeros(grad_row_ptr, columns, n_cols, BLOCK)


@triton.jit
def _write(
    pointers,
    grad_pointers,
    weight_pointers,
    lane,  # (BLOCK,) 0, 1, ... as float32
    left,  # columns from the first lane to the end of the row; not read unless MASKED
    target,  # relative to the first lane, float32
    lse,
    total,  # A, B, C of reference.row_coefficients
    b,
    c,
    entropy,
    grad_entropy,
    logit_scale,
    softcap,
    MASKED: tl.constexpr,  # the tile ends behind the row
    HAS_ENTROPY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,  # see softcap of triton/configs.py
):
    """The gradient of one tile."""
    if MASKED:
        exists = tl.arange(0, pointers.shape[0]) < left
        z = tl.load(pointers, mask=exists, other=0.0)
    else:
        z = tl.load(pointers)
    x = activate(z.to(tl.float32), logit_scale, softcap, SOFTCAP)
    log_p = x - lse
    p = tl.exp(log_p)
    grad = total * p
    if HAS_ENTROPY:
        grad -= tl.where(p == 0.0, 0.0, grad_entropy * p * (log_p + entropy))
    grad = tl.where(lane == target, grad - b, grad)
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            if MASKED:
                w = tl.load(weight_pointers, mask=exists, other=0.0)
            else:
                w = tl.load(weight_pointers)
            grad -= c * w
        else:
            grad -= c
    if SOFTCAP != 0:
        ratio = x * (1.0 / softcap)
        grad *= 1.0 - ratio * ratio
    grad *= logit_scale
    if MASKED:
        tl.store(grad_pointers, grad.to(grad_pointers.dtype.element_ty), mask=exists)
    else:
        tl.store(grad_pointers, grad.to(grad_pointers.dtype.element_ty))


@triton.jit(
    do_not_specialize=[
        "n_rows", "chunk", "n_inner", "n_out_inner", "ignore_index", "label_smoothing", "softcap", "logit_scale",
    ]
)  # fmt: skip
def backward_kernel(
    grad_loss_ptr,  # (N,) with a stride, 0 for an expanded scalar
    grad_lse_ptr,  # (N,) likewise
    grad_entropy_ptr,  # (N,) likewise
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, int64 or int32
    lse_ptr,  # (N,) float32
    entropy_ptr,  # (N,) float32
    weight_ptr,  # (V,) float32
    weight_sum_ptr,  # (1,) float32
    grad_ptr,  # (outer, inner, V): may be the logits themselves
    n_rows,
    chunk,  # rows of a program
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    n_out_inner,
    out_stride_outer,
    out_stride_inner,
    grad_loss_stride,
    grad_lse_stride,
    grad_entropy_stride,
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,  # see softcap of triton/configs.py
    BLOCK: tl.constexpr,
):
    """grad_x_j = A softmax_j - B [j == t] - C w_j; A, B, C as in reference.row_coefficients."""
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    columns = tl.arange(0, BLOCK)
    lane = columns.to(tl.float32)
    n_full = n_cols // BLOCK * BLOCK
    for row in tl.range(begin, end):
        row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
        grad_row_ptr = grad_ptr + row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
        row_index = tl.cast(row, tl.int64)
        target = tl.load(target_ptr + row).to(tl.int64)
        valid = (target >= 0) & (target < n_cols)
        lse = tl.load(lse_ptr + row)
        a = tl.load(grad_loss_ptr + row_index * grad_loss_stride).to(tl.float32)
        a = tl.where(valid, a, float("nan"))
        a = tl.where(target == ignore_index, 0.0, a)
        b = a
        if HAS_SMOOTHING:
            b *= 1.0 - label_smoothing
        if HAS_WEIGHT:
            target_weight = tl.load(weight_ptr + tl.where(valid, target, 0))
            b *= tl.where(target == ignore_index, 0.0, target_weight)  # that of an ignored class may be infinite
        total = b
        c = tl.cast(0.0, tl.float32)
        if HAS_SMOOTHING:
            c = a * (label_smoothing / n_cols)
            if HAS_WEIGHT:
                total += c * tl.load(weight_sum_ptr)
            else:
                total += c * n_cols
        if HAS_GRAD_LSE:
            total += tl.load(grad_lse_ptr + row_index * grad_lse_stride).to(tl.float32)
        live = (total != 0.0) | (a != 0.0)
        grad_entropy = tl.cast(0.0, tl.float32)
        entropy = tl.cast(0.0, tl.float32)
        if HAS_ENTROPY:
            grad_entropy = tl.load(grad_entropy_ptr + row_index * grad_entropy_stride).to(tl.float32)
            entropy = tl.load(entropy_ptr + row)
            live = live | (grad_entropy != 0.0)
        if live:
            for start in tl.range(0, n_full, BLOCK):
                _write(
                    row_ptr + start + columns, grad_row_ptr + start + columns, weight_ptr + start + columns, lane,
                    n_cols, (target - start).to(tl.float32), lse, total, b, c, entropy, grad_entropy,
                    logit_scale, softcap, False, HAS_ENTROPY, HAS_WEIGHT, HAS_SMOOTHING, SOFTCAP,
                )  # fmt: skip
            if n_full < n_cols:
                _write(
                    row_ptr + n_full + columns, grad_row_ptr + n_full + columns, weight_ptr + n_full + columns, lane,
                    n_cols - n_full, (target - n_full).to(tl.float32), lse, total, b, c, entropy,
                    grad_entropy, logit_scale, softcap, True, HAS_ENTROPY, HAS_WEIGHT, HAS_SMOOTHING, SOFTCAP,
                )  # fmt: skip
        else:
            _write_zeros(grad_row_ptr, columns, n_cols, BLOCK)
