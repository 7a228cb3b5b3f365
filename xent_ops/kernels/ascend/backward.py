"""The gradient of the row operator, or of a shard's columns. Each element is read once and written once."""

import triton
import triton.language as tl

from ..triton.numerics import fold_low, row_offset
from .forward import activate


@triton.jit
def write_zeros(grad_row_ptr, n_cols, BLOCK: tl.constexpr):
    """The gradient of a row without an upstream gradient: zeros, for any logits."""
    TILE: tl.constexpr = (BLOCK + 3) // 4  # the compiler keeps the zeros in the buffer throughout the kernel
    columns = tl.arange(0, TILE)
    zeros = tl.zeros([TILE], grad_row_ptr.dtype.element_ty)
    for start in tl.range(0, n_cols, TILE):
        tl.store(grad_row_ptr + start + columns, zeros, mask=columns < n_cols - start)


@triton.jit
def _gradient(
    z,  # logits: a tile, or the target's logit
    w,  # their class weights; read only with HAS_WEIGHT and HAS_SMOOTHING
    lse,
    total,  # A, B, C of reference.cross_entropy_backward, times logit_scale
    b,
    c,
    entropy,
    grad_entropy,  # times logit_scale
    logit_scale,
    softcap,
    AT_TARGET: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    x = activate(z.to(tl.float32), logit_scale, softcap, HAS_SCALE, SOFTCAP)
    log_p = x - lse
    p = tl.exp(log_p)
    grad = total * p
    if HAS_ENTROPY:
        grad -= tl.where(p == 0.0, 0.0, grad_entropy * p * (log_p + entropy))
    if AT_TARGET:
        grad -= b
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            grad -= c * w
        else:
            grad -= c
    if SOFTCAP != 0:
        ratio = x * (1.0 / softcap)
        grad *= 1.0 - ratio * ratio
    return grad


@triton.jit(
    do_not_specialize=[
        "n_rows", "chunk", "n_inner", "n_out_inner", "class_start", "n_classes", "ignore_index", "label_smoothing",
        "softcap", "logit_scale",
    ]
)  # fmt: skip
def backward_kernel(
    grad_loss_ptr,  # (N,) with a stride, 0 for an expanded scalar
    grad_lse_ptr,  # (N,) with a stride
    grad_entropy_ptr,  # (N,) with a stride
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, int64 or int32
    lse_ptr,  # (N,) float32
    lse_low_ptr,  # (N,) float32: what the rounding of the lse took
    entropy_ptr,  # (N,) float32
    weight_ptr,  # (V,) float32
    lse_coefficient_ptr,  # float32: (1,), the sum of the weights; with SHARD (N,), d loss / d lse
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
    class_start,  # the class of column 0
    n_classes,  # of the whole vocabulary
    ignore_index,
    label_smoothing,
    softcap,
    logit_scale,
    SHARD: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_LSE_LOW: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,  # logit_scale is not 1
    SOFTCAP: tl.constexpr,  # see softcap of triton/configs.py
    BLOCK: tl.constexpr,
):
    """grad_x_j = A softmax_j - B [j == t] - C w_j; A, B, C as in reference.cross_entropy_backward.

    A row is written as if no column were the target's. Then the target's column is written again. Comparing every
    column with the target would double the vector operations of a plain loss.
    """
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    columns = tl.arange(0, BLOCK)
    for row in tl.range(begin, end):
        row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
        grad_row_ptr = grad_ptr + row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
        row_index = tl.cast(row, tl.int64)
        target = tl.load(target_ptr + row).to(tl.int64)
        local = target - class_start
        owned = (local >= 0) & (local < n_cols)
        column = tl.where(owned, local, 0)
        lse = tl.load(lse_ptr + row)
        a = tl.load(grad_loss_ptr + row_index * grad_loss_stride).to(tl.float32)
        a = tl.where((target >= 0) & (target < n_classes), a, float("nan"))
        a = tl.where(target == ignore_index, 0.0, a)
        total = a
        b = a
        c = tl.cast(0.0, tl.float32)
        if HAS_SMOOTHING:
            b *= 1.0 - label_smoothing
            c = a * (label_smoothing / n_classes)
        target_weight = tl.cast(1.0, tl.float32)
        if HAS_WEIGHT:
            target_weight = tl.load(weight_ptr + column)
            b *= tl.where(target == ignore_index, 0.0, target_weight)  # the weight of an ignored class may be infinite
            if SHARD:
                total *= tl.load(lse_coefficient_ptr + row)
            else:
                total = b
                if HAS_SMOOTHING:
                    total += c * tl.load(lse_coefficient_ptr)
        if HAS_GRAD_LSE:
            total += tl.load(grad_lse_ptr + row_index * grad_lse_stride).to(tl.float32)
        live = (total != 0.0) | (a != 0.0)
        grad_entropy = tl.cast(0.0, tl.float32)
        entropy = tl.cast(0.0, tl.float32)
        if HAS_ENTROPY:
            grad_entropy = tl.load(grad_entropy_ptr + row_index * grad_entropy_stride).to(tl.float32)
            grad_entropy = tl.where(target == ignore_index, 0.0, grad_entropy)
            entropy = tl.load(entropy_ptr + row)
            live = live | (grad_entropy != 0.0)
        if live:
            z_target = tl.load(row_ptr + column)  # before the row is overwritten
            total *= logit_scale
            b *= logit_scale
            c *= logit_scale
            grad_entropy *= logit_scale
            if HAS_LSE_LOW:
                total, entropy, grad_entropy = fold_low(tl.load(lse_low_ptr + row), total, entropy, grad_entropy)
            for start in tl.range(0, n_cols, BLOCK):
                exists = columns < n_cols - start
                z = tl.load(row_ptr + start + columns, mask=exists, other=0.0)
                w = z
                if HAS_WEIGHT and HAS_SMOOTHING:
                    w = tl.load(weight_ptr + start + columns, mask=exists, other=0.0)
                grad = _gradient(
                    z, w, lse, total, b, c, entropy, grad_entropy, logit_scale, softcap,
                    False, HAS_ENTROPY, HAS_WEIGHT, HAS_SMOOTHING, HAS_SCALE, SOFTCAP,
                )  # fmt: skip
                tl.store(grad_row_ptr + start + columns, grad.to(grad_ptr.dtype.element_ty), mask=exists)
            if owned & (b != 0.0):
                grad_target = _gradient(
                    z_target, target_weight, lse, total, b, c, entropy, grad_entropy, logit_scale, softcap,
                    True, HAS_ENTROPY, HAS_WEIGHT, HAS_SMOOTHING, HAS_SCALE, SOFTCAP,
                )  # fmt: skip
                tl.debug_barrier()  # the row has been written
                tl.store(grad_row_ptr + column, grad_target.to(grad_ptr.dtype.element_ty))
        else:
            write_zeros(grad_row_ptr, n_cols, BLOCK)
