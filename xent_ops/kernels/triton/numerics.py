"""Device functions that the kernels share."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) is computed as exp2(x * log2 e): one multiply, one instruction
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(u):
    """tanh to the last bits of the dtype.

    No libdevice: it does not lower for every Triton backend. 1 - 2 / (exp(2|u|) + 1) loses digits to cancellation
    near 0, so |u| < 0.625 takes the polynomials of the Cephes library (tanhf.c, tanh.c).
    """
    square = u * u
    if u.dtype == tl.float64:
        p = (-9.64399179425052238628e-1 * square - 9.92877231001918586564e1) * square - 1.61468768441708447952e3
        q = (
            (square + 1.12811678491632931402e2) * square + 2.23548839060100448583e3
        ) * square + 4.84406305325125486048e3
        small = u + u * square * (p / q)
    else:
        p = (((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
             + 1.33314422036e-1) * square - 3.33332819422e-1  # fmt: skip
        small = u + u * square * p
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(u) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(u) < 0.625, small, tl.where(u < 0, -large, large))


@triton.jit
def activate(z, softcap, HAS_SOFTCAP: tl.constexpr):
    """x = softcap * tanh(z / softcap), or z. The reciprocal is of a scalar: one division a program."""
    if HAS_SOFTCAP:
        z = softcap * tanh(z * (1.0 / softcap))
    return z


@triton.jit
def row_offset(row, n_inner, stride_outer, stride_inner):
    """Offset of a row, in int64: rows are (outer, inner) pairs, so that logits[:, :-1] needs no copy."""
    outer = row // n_inner
    return tl.cast(outer, tl.int64) * stride_outer + tl.cast(row - outer * n_inner, tl.int64) * stride_inner


@triton.jit
def aligned_body(offset, n_cols, EDGES: tl.constexpr, VECTOR: tl.constexpr):
    """(columns before the first 16-byte boundary of a row, its offset, length of the aligned part after it).

    Rows of an odd vocabulary start anywhere. What lies between the first and the last boundary is read in 16-byte
    vectors all the same; the fewer than 2 * VECTOR columns at the edges go apart. The products tell Triton's alignment
    analysis what is divisible by VECTOR.
    """
    if EDGES:
        boundary = (offset + (VECTOR - 1)) // VECTOR * VECTOR
        head = tl.minimum((boundary - offset).to(tl.int32), n_cols)
        body = (n_cols - head) // VECTOR * VECTOR
    else:
        boundary = offset
        head = 0
        body = n_cols
    return head, boundary, body


@triton.jit
def edge_columns(head, body, n_cols, VECTOR: tl.constexpr):
    """The columns outside the aligned body as (2, VECTOR), and which of them exist."""
    side = tl.arange(0, 2)[:, None]
    columns = tl.arange(0, VECTOR)[None, :] + side * (head + body)
    return columns, columns < tl.where(side == 0, head, n_cols)


@triton.jit
def without_infinity(maximum):
    """A running maximum that can be subtracted: 0 while only -inf has been seen (-inf - -inf is NaN)."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
