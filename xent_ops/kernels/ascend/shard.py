"""A vocabulary split over ranks: one shard's part of every row. What it hands over is in kernels/reference_shard.py."""

import triton
import triton.language as tl

from .. import reference_shard
from ..triton.numerics import row_offset, without_infinity
from .forward import activate, scan, shift_of

DIGIT = tl.constexpr(reference_shard.DIGIT)


@triton.jit(
    do_not_specialize=[
        "n_rows", "chunk", "n_cols", "n_inner", "class_start", "n_classes", "label_smoothing", "softcap", "logit_scale",
    ]
)  # fmt: skip
def shard_kernel(
    logits_ptr,  # (outer, inner, n_cols) of this rank, rows of any stride
    target_ptr,  # (N,), contiguous, int64 or int32; classes of the whole vocabulary
    weight_ptr,  # (n_cols,) float32
    out_ptr,  # (numbers * N + HEADER,) float32
    n_rows,
    chunk,  # rows of a program
    n_cols,  # columns of this rank that are classes, may be 0
    n_inner,
    stride_outer,
    stride_inner,
    class_start,
    n_classes,  # of the whole vocabulary
    label_smoothing,
    softcap,
    logit_scale,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,  # logit_scale is not 1
    SOFTCAP: tl.constexpr,  # see softcap of triton/configs.py
    BLOCK: tl.constexpr,
):
    """A program a chunk of rows. The one of row 0 also writes the header."""
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    columns = tl.arange(0, BLOCK)
    size = tl.cast(n_cols, tl.int64)
    start = tl.cast(class_start, tl.int64)
    number = tl.cast(n_rows, tl.int64)
    header_ptr = out_ptr + (4 if HAS_WEIGHT else 3) * number
    for row in tl.range(begin, end):
        row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
        local = tl.load(target_ptr + row).to(tl.int64) - start
        owned = (local >= 0) & (local < size)
        column = tl.where(owned, local, 0)
        x_target = tl.cast(0.0, tl.float32)
        target_weight = tl.cast(0.0, tl.float32)
        if n_cols > 0:
            z_target = tl.load(row_ptr + column).to(tl.float32)
            x_target = activate(z_target, logit_scale, softcap, HAS_SCALE, SOFTCAP)
            if HAS_WEIGHT:
                target_weight = tl.load(weight_ptr + column)
        shift = shift_of(x_target)
        maximum, total, _moment, smooth, weights, _top, _start = scan(
            row_ptr, weight_ptr, columns, n_cols, shift, logit_scale, softcap, HAS_WEIGHT, HAS_SMOOTHING, HAS_SCALE,
            SOFTCAP, False, False, BLOCK,
        )  # fmt: skip
        pivot = without_infinity(maximum)
        part = pivot - x_target
        if HAS_WEIGHT:
            target_weight = tl.where(owned, target_weight, 0.0)
            part *= target_weight
            tl.store(out_ptr + 3 * number + row, target_weight)
        if not (HAS_WEIGHT and HAS_SMOOTHING):
            weights = size.to(tl.float32)
        part = tl.where(owned, part, 0.0)
        if HAS_SMOOTHING:
            part = (1.0 - label_smoothing) * part + label_smoothing / n_classes * (weights * (pivot - shift) - smooth)
        tl.store(out_ptr + row, maximum)
        tl.store(out_ptr + number + row, total)
        tl.store(out_ptr + 2 * number + row, part)
        if row == 0:
            tl.store(header_ptr, (start // DIGIT).to(tl.float32))
            tl.store(header_ptr + 1, (start % DIGIT).to(tl.float32))
            tl.store(header_ptr + 2, (size // DIGIT).to(tl.float32))
            tl.store(header_ptr + 3, (size % DIGIT).to(tl.float32))
            tl.store(header_ptr + 4, weights)
