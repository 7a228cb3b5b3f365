"""Device functions that the kernels share."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) is computed as exp2(x * log2 e): one multiply, one instruction
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(u):
    """tanh to the last bits of the dtype. Not libdevice's: it does not lower on every Triton backend.

    float32: a rational function, to 3 * 2^-23 relative, in 17 instructions and one of the slow kind (exponentials that
    switch to a polynomial near 0 take 20 and two). float64: 1 - 2 / (exp(2|u|) + 1) loses digits to cancellation
    near 0, where the rational function of the Cephes library (tanh.c) takes over.
    """
    if u.dtype == tl.float64:
        square = u * u
        p = (-9.64399179425052238628e-1 * square - 9.92877231001918586564e1) * square - 1.61468768441708447952e3
        q = (
            (square + 1.12811678491632931402e2) * square + 2.23548839060100448583e3
        ) * square + 4.84406305325125486048e3
        small = u + u * square * (p / q)
        large = 1.0 - 2.0 / (tl.exp2(tl.abs(u) * (2.0 * LOG2E)) + 1.0)
        return tl.where(tl.abs(u) < 0.625, small, tl.where(u < 0, -large, large))
    u = tl.clamp(u, -9.02, 9.02, propagate_nan=tl.PropagateNan.ALL)  # beyond, tanh is 1 in float32
    square = u * u
    # Least relative error over 0 < u < 9.02 (Lawson's reweighting of the linearised fit): 2.1e-8.
    p = (((1.3319071040615423e-8 * square + 2.058348117180845e-5) * square + 3.494034593871608e-3) * square
         + 1.3379718006484415e-1) * square + 0.9999999790622823  # fmt: skip
    q = (((7.762019234573101e-7 * square + 3.2830928602978595e-4) * square + 2.5871073417883222e-2) * square
         + 4.6713033259862513e-1) * square + 1.0  # fmt: skip
    return u * p * (1.0 / q)


@triton.jit
def _reciprocal(y):
    """1 / y of a positive y, in two instructions. A division takes five, because it scales very large and small y."""
    root = tl.rsqrt(y)
    return root * root


@triton.jit
def activation_of(softcap, logit_scale, ACC: tl.constexpr):
    """The numbers of ``activate``, as one value: a kernel builds it once, and only this file takes it apart.

    A plain tuple: AOTInductor copies a kernel's source, but no class that it names. FLAGS says which softcap it is,
    because a constexpr in a tuple becomes a number at run time (Triton 3.6 to 3.9).
    """
    return tl.cast(softcap, ACC), tl.cast(logit_scale, ACC)


@triton.jit
def tanh_residual(z, act, TILE: tl.constexpr):
    """(1 - tanh(logit_scale * z / softcap)) / 2, which is 1 / (exp(2u) + 1), for FLAGS.softcap == 2.

    In a TILE four neighbours share a reciprocal, 1 / a = b (1 / ab), because the unit for reciprocals limits these
    kernels. exp(2u) is at most 2^31, so that the product of four is finite; tanh is then 1 to 1e-9.
    """
    softcap, logit_scale = act
    u = tl.minimum(z * (2.0 * LOG2E * logit_scale / softcap), 31.0, propagate_nan=tl.PropagateNan.ALL)
    y = tl.exp2(u) + 1.0
    if TILE:
        a, b = tl.split(tl.reshape(y, [y.numel // 4, 2, 2]))
        pairs = a * b
        first, second = tl.split(pairs)
        all_four = _reciprocal(first * second)
        pair = tl.join(all_four * second, all_four * first)
        residual = tl.reshape(tl.join(pair * b, pair * a), y.shape)
    else:
        residual = _reciprocal(y)
    return residual


@triton.jit
def bounded(residual, act, pivot):
    """(x - pivot) / ln 2 for FLAGS.softcap == 2. The cap is at most 64, and e^64 is 6e27: sums need no maximum."""
    softcap, _ = act
    return (softcap - pivot) * LOG2E - (2.0 * LOG2E * softcap) * residual


@triton.jit
def activate(z, act, FLAGS: tl.constexpr):
    """x of a logit."""
    softcap, logit_scale = act
    return activate_by(z.to(logit_scale.dtype), softcap, logit_scale, FLAGS.softcap)


@triton.jit
def activate_by(z, softcap, logit_scale, SOFTCAP: tl.constexpr):
    """x = softcap * tanh(logit_scale * z / softcap), or logit_scale * z; see configs.softcap for SOFTCAP."""
    if SOFTCAP == 0:
        x = z * logit_scale
    elif SOFTCAP == 1:
        x = softcap * _tanh(z * (logit_scale / softcap))
    else:
        x = softcap - 2.0 * softcap / (tl.exp2(z * (2.0 * LOG2E * logit_scale / softcap)) + 1.0)
    return x


@triton.jit
def scale_of(act):
    """x per logit, without the softcap."""
    _, logit_scale = act
    return logit_scale


@triton.jit
def slope_unit(act, FLAGS: tl.constexpr):
    """The common factor of all elements' derivatives: tanh' is 4 r (1 - r), with r from ``tanh_residual``."""
    scale = scale_of(act)
    return 4.0 * scale if FLAGS.softcap == 2 else scale


@triton.jit
def tanh_slope(x, act):
    """1 - (x / softcap)^2, the derivative of a softcap relative to the scale."""
    softcap, _ = act
    share = x * (1.0 / softcap)  # not x * x / softcap^2: the square of a small cap is 0
    return 1.0 - share * share


@triton.jit
def row_offset(row, n_inner, stride_outer, stride_inner):
    """Offset of a row, in int64: rows are (outer, inner) pairs, so that logits[:, :-1] needs no copy."""
    outer = row // n_inner
    return tl.cast(outer, tl.int64) * stride_outer + tl.cast(row - outer * n_inner, tl.int64) * stride_inner


@triton.jit
def aligned_body(offset, n_cols, EDGES: tl.constexpr, VECTOR: tl.constexpr):
    """(columns before the first boundary of a row, the boundary's offset, length of the body after it).

    The body is read in vectors. Rows of an odd vocabulary start anywhere: EDGES is then the number of elements between
    two boundaries (configs.edges), a multiple of VECTOR; else 0. The fewer than 2 * EDGES columns before and after the
    body are read separately. The multiplications by VECTOR show Triton's alignment analysis that the results are
    divisible by it. For arguments Triton only knows whether 16 divides them.
    """
    if EDGES:
        boundary = (offset + (EDGES - 1)) // EDGES * EDGES
        head = tl.minimum((boundary - offset).to(tl.int32), n_cols)
        body = (n_cols - head) // VECTOR * VECTOR
    else:
        boundary = offset // VECTOR * VECTOR
        head = 0
        body = n_cols // VECTOR * VECTOR
    return head, boundary, body


@triton.jit
def weights_from(weight_ptr, column, n_classes, EDGES: tl.constexpr):
    """The class weights from this column on. With EDGES, in the copy of common.class_weights in which they start on a
    16-byte boundary."""
    start = column
    if EDGES:
        lead = column & 3
        start = (lead * ((n_classes + 3) // 4 * 4) + column - lead) // 4 * 4
    return weight_ptr + start


@triton.jit
def edge_columns(head, body, n_cols, EDGES: tl.constexpr):
    """The columns outside the body, (2, EDGES), and a mask of those that exist."""
    side = tl.arange(0, 2)[:, None]
    columns = tl.arange(0, EDGES)[None, :] + side * (head + body)
    return columns, columns < tl.where(side == 0, head, n_cols)


@triton.jit
def without_infinity(maximum):
    """A running maximum that can be subtracted: 0 while only -inf has been seen (-inf - -inf is NaN)."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def split_lse(pivot, log_total):
    """(lse, lse_low) as ``reference.split_lse``."""
    lse = pivot + log_total
    rounded = lse - pivot
    low = (pivot - (lse - rounded)) + (log_total - rounded)
    return lse, tl.where(tl.abs(low) < float("inf"), low, 0.0)


@triton.jit
def fold_low(lse_low, total, entropy, grad_entropy):
    """(total, entropy, grad_entropy) for a softmax of the rounded lse: ``reference.fold_low``."""
    share = tl.exp(-lse_low)
    return total * share, entropy - lse_low, grad_entropy * share
