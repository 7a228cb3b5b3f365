"""Operands of 8-bit numbers (e4m3) for matrix multiplications, in two layouts. reference_fp8.py has the reasons.

An 8-bit operand must be dense along the summed dimension, and the gradient of the logits is summed along both.
"""

import triton
import triton.language as tl

from .backward import gradient
from .numerics import activation_of, slope_unit

LARGEST = tl.constexpr(448.0)
LEAST_NORMAL = tl.constexpr(0.015625)  # 2^-6


@triton.jit
def _e4m3(values, added, RANDOM: tl.constexpr):
    """The bits of float32 numbers in e4m3: rounded to nearest, or at random, where ``added`` has 20 random bits.

    Below 2^-6 the numbers of e4m3 are as far apart as between 2^-6 and 2^-5: there 2^-6 is added before the rounding.
    In integer arithmetic: if the bytes of a hardware conversion of two numbers are split again, ptxas 12.8 loses one
    (2026-11-25).
    """
    size = tl.abs(values)
    low = size < LEAST_NORMAL
    word = tl.where(low, size + LEAST_NORMAL, size).to(tl.int32, bitcast=True)
    word += added if RANDOM else 0x7FFFF + ((word >> 20) & 1)
    code = tl.minimum((word >> 20) - tl.where(low, 968, 960), 126)  # 7 replaces 127 as the exponents' bias; 448 is 126
    code = tl.where(values == values, code, 127)  # for NaN the sum may overflow
    return tl.where(values < 0.0, code | 128, code)


@triton.jit
def _store_both(rows_ptr, columns_ptr, codes, row, column, row_mask, column_mask, rows_stride, columns_stride,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """A tile (rows, columns), and transposed."""
    mask = row_mask[:, None] & column_mask[None, :]
    if ROWS:
        tl.store(rows_ptr + row[:, None].to(tl.int64) * rows_stride + column[None, :], codes, mask=mask)
    if COLUMNS:
        transposed = tl.trans(codes)
        tl.store(
            columns_ptr + column[:, None].to(tl.int64) * columns_stride + row[None, :], transposed, mask=tl.trans(mask)
        )


@triton.jit
def quantize_kernel(
    values_ptr,  # (R, C), rows of any stride
    scale_ptr,  # ()
    factor_ptr,  # (R,): rows are multiplied by it
    rows_ptr,  # written: (R, C) with zeros behind it
    columns_ptr,  # written: (C, R) with zeros behind it
    n_rows,
    n_cols,
    stride,
    most_rows,  # that are written, beyond R and C zeros
    most_cols,
    rows_stride,
    columns_stride,
    FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row < n_rows)[:, None] & (column < n_cols)[None, :]
    pointers = values_ptr + row[:, None].to(tl.int64) * stride + column[None, :]
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if FACTOR:
        values *= tl.load(factor_ptr + row, mask=row < n_rows, other=0.0)[:, None]
    values = values / tl.load(scale_ptr)
    values = tl.where(mask, values, 0.0)  # a scale may be NaN
    codes = _e4m3(values, 0, False).to(tl.uint8)
    _store_both(
        rows_ptr, columns_ptr, codes, row, column, row < most_rows, column < most_cols, rows_stride, columns_stride,
        ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _random_bits(pair, seed):
    """A hash of both: 16 bits for each of two columns."""
    mixed = pair.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32, bitcast=True)
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    return mixed ^ (mixed >> 15)


@triton.jit
def _rounded_at_random(grad, first_column, seed, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Two columns share a hash. Splitting them also keeps Triton from loading the logits in the layout of the
    transposed store, with a row's elements far apart (1024 x 128256: 300 us instead of 600)."""
    even, odd = tl.split(tl.reshape(grad, [BLOCK_R, BLOCK_C // 2, 2]))
    pair = first_column // 2 + tl.arange(0, BLOCK_C // 2)
    bits = _random_bits(pair[None, :], seed[:, None])
    even = _e4m3(even, ((bits & 0xFFFF) << 4).to(tl.int32), True)
    odd = _e4m3(odd, ((bits >> 16) << 4).to(tl.int32), True)
    return tl.reshape(tl.join(even, odd), [BLOCK_R, BLOCK_C]).to(tl.uint8)


@triton.jit
def gradient_fp8_kernel(
    logits_ptr,  # (n, V), rows of any stride
    numbers_ptr,  # (7, n), float32: A, B, C, lse, entropy, grad_entropy, bound
    column_ptr,  # (n,) int64: the target's column, or -1
    seed_ptr,  # (n,) int32
    weight_ptr,  # (V,)
    rows_ptr,  # written: (n, V), with zeros behind it
    columns_ptr,  # written: (V, n)
    n_rows,
    n_cols,
    most_cols,  # that are written to rows_ptr
    stride,
    numbers_stride,
    rows_stride,
    columns_stride,
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """448 / bound times the gradient: reference_fp8.gradient."""
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists, inside = row < n_rows, column < n_cols
    act = activation_of(softcap, logit_scale, tl.float32)
    unit = slope_unit(act, FLAGS)
    number_ptr = numbers_ptr + row
    total = tl.load(number_ptr, mask=exists, other=0.0) * unit
    at_target = tl.load(number_ptr + numbers_stride, mask=exists, other=0.0) * unit
    by_class = tl.zeros([BLOCK_R], tl.float32)
    if FLAGS.smoothing:
        by_class = tl.load(number_ptr + 2 * numbers_stride, mask=exists, other=0.0) * unit
    lse = tl.load(number_ptr + 3 * numbers_stride, mask=exists, other=0.0)
    entropy, grad_entropy = tl.zeros([BLOCK_R], tl.float32), tl.zeros([BLOCK_R], tl.float32)
    if FLAGS.entropy:
        entropy = tl.load(number_ptr + 4 * numbers_stride, mask=exists, other=0.0)
        grad_entropy = tl.load(number_ptr + 5 * numbers_stride, mask=exists, other=0.0) * unit
    bound = tl.load(number_ptr + 6 * numbers_stride, mask=exists, other=0.0)
    live = bound != 0.0  # else zeros, for any logits
    lse = tl.where(live, lse, 0.0)
    entropy = tl.where(live, entropy, 0.0)
    factor = tl.where(live, LARGEST / bound, 0.0)
    target = tl.load(column_ptr + row, mask=exists, other=-1).to(tl.int32)
    seed = tl.load(seed_ptr + row, mask=exists, other=0)

    read = live[:, None] & exists[:, None] & inside[None, :]
    pointers = logits_ptr + row[:, None].to(tl.int64) * stride + column[None, :]
    z = tl.load(pointers, mask=read, other=0.0).to(tl.float32)
    weight = tl.zeros([1, BLOCK_C], tl.float32)
    if FLAGS.smoothing and FLAGS.weight:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)[None, :]
    grad, slope = gradient(
        z, lse[:, None], total[:, None], by_class[:, None], weight, entropy[:, None], grad_entropy[:, None], act,
        FLAGS, True,
    )  # fmt: skip
    grad -= tl.where(column[None, :] == target[:, None], at_target[:, None], 0.0)
    grad = tl.where(inside[None, :] & live[:, None], grad * slope * factor[:, None], 0.0)
    codes = _rounded_at_random(grad, tl.program_id(0) * BLOCK_C, seed, BLOCK_R, BLOCK_C)
    _store_both(
        rows_ptr, columns_ptr, codes, row, column, exists, column < most_cols, rows_stride, columns_stride, ROWS, False
    )
    _store_both(rows_ptr, columns_ptr, codes, row, column, exists, inside, rows_stride, columns_stride, False, COLUMNS)
