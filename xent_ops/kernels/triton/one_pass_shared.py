"""Loss and gradient in one pass, the row kept in shared memory between its sums and its gradient.

Written in Gluon, the layer of Triton that can address shared memory. For NVIDIA, and for the plain loss (a z-loss and a
positive logit_scale are plain); one_pass.py has every option and runs everywhere.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name from Triton 3.7 on, and before


@gluon.jit
def _fold(maximum, total, z, k):
    """Fold a tile (lanes, vector) into each lane's maximum, and its sum of 2^(k z - round(k maximum)).

    Each difference is one fused multiply-add, so that k z is not rounded by itself: logits near 1e4 would lose 1e-3.
    Written as gl.fma, here in the loop, it is 5 % slower.
    """
    new_maximum = gl.maximum(maximum, gl.max(z, axis=1))
    pivot = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) * k
    decay = gl.exp2(maximum * k - pivot)
    return new_maximum, total * decay + gl.sum(gl.exp2(z * k - pivot[:, None]), axis=1)


@gluon.jit
def _row_offset(row, n_inner, stride_outer, stride_inner):
    outer = row // n_inner
    return outer.to(gl.int64) * stride_outer + (row - outer * n_inner).to(gl.int64) * stride_inner


@gluon.jit(do_not_specialize=["n_inner", "n_out_inner", "ignore_index", "logit_scale"])
def one_pass_shared_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    grad_scale_ptr,  # (N,) with a stride, 0 for a scalar
    grad_lse_square_ptr,  # (N,) likewise
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    grad_ptr,  # (outer, inner, V): may be the logits themselves
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    n_out_inner,
    out_stride_outer,
    out_stride_inner,
    grad_scale_stride,
    grad_lse_square_stride,
    ignore_index: "i64",
    logit_scale: "fp64",
    HAS_LSE_SQUARE: gl.constexpr,
    EDGES: gl.constexpr,  # as in numerics.aligned_body; where it is not 0, logits and gradient have equal strides
    TILE: gl.constexpr,
    TILES: gl.constexpr,  # of a row
    KEPT: gl.constexpr,  # of them in shared memory; the others are read again, from the L2 cache
    VECTOR: gl.constexpr,  # elements in 16 bytes
    WARPS: gl.constexpr,
):
    """One program a row. A thread reads in shared memory what it put there itself."""
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32, 1], [WARPS, 1], [1, 0])
    lanes: gl.constexpr = gl.SliceLayout(1, layout)
    LANES: gl.constexpr = TILE // VECTOR
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    # With EDGES up to EDGES - 1 columns are in no tile, so that the last one may be empty.
    RAGGED: gl.constexpr = TILES - 2 if EDGES else TILES - 1  # the first tile that may not be full

    row = gl.program_id(0)
    offset = _row_offset(row, n_inner, stride_outer, stride_inner)
    out_offset = _row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
    head = 0
    if EDGES:
        head = gl.minimum(((EDGES - 1) - (offset + (EDGES - 1)) % EDGES).to(gl.int32), n_cols)
    # As in numerics.aligned_body. Copies to shared memory do not compile where the compiler cannot tell alignment.
    boundary = (offset + head) // VECTOR * VECTOR
    out_boundary = (out_offset + head) // VECTOR * VECTOR
    body = (n_cols - head) // VECTOR * VECTOR
    columns = gl.arange(0, LANES, layout=lanes)[:, None] * VECTOR
    columns += gl.arange(0, VECTOR, layout=gl.SliceLayout(0, layout))[None, :]
    # A tile's addresses are one 64-bit base and 32-bit columns: 64-bit ones for each lane take registers, of which a
    # thread has 64 where 32 warps share a row.
    row_ptr = logits_ptr + boundary
    out_row_ptr = grad_ptr + out_boundary

    kept = gl.allocate_shared_memory(logits_ptr.dtype.element_ty, [KEPT, LANES, VECTOR], flat)
    for i in gl.static_range(KEPT):
        async_copy.async_copy_global_to_shared(
            kept.index(i), row_ptr + (i * TILE + columns), mask=i * TILE + columns < body, eviction_policy="evict_first"
        )
        async_copy.commit_group()
    scale = gl.cast(logit_scale, gl.float32)
    k = scale * LOG2E
    target = gl.load(target_ptr + row).to(gl.int64)
    valid = (target >= 0) & (target < n_cols)
    z_target = gl.load(logits_ptr + offset + target, mask=valid, other=0.0).to(gl.float32)
    a = gl.load(grad_scale_ptr + row.to(gl.int64) * grad_scale_stride).to(gl.float32)

    maximum = gl.full([LANES], float("-inf"), gl.float32, layout=lanes)
    total = gl.full([LANES], 0.0, gl.float32, layout=lanes)
    for i in gl.static_range(KEPT, TILES):
        z = gl.load(
            row_ptr + (i * TILE + columns), mask=i * TILE + columns < body, other=0.0, eviction_policy="evict_last"
        )
        z = z.to(gl.float32)
        if i >= RAGGED:
            z = gl.where(i * TILE + columns < body, z, float("-inf"))
        maximum, total = _fold(maximum, total, z, k)
    if EDGES:  # of one column each, in the first lanes of a tile
        edge = gl.arange(0, LANES, layout=lanes)
        edge_columns = gl.where(edge < head, edge, edge + body)
        is_edge = (edge < 2 * EDGES) & (edge_columns < n_cols)
        z_edge = gl.load(logits_ptr + offset + edge_columns, mask=is_edge, other=0.0).to(gl.float32)
        z = gl.where(is_edge, z_edge, float("-inf"))
        maximum, total = _fold(maximum, total, z[:, None], k)
    for i in gl.static_range(KEPT):
        async_copy.wait_group(KEPT - 1 - i)
        z = kept.index(i).load(layout).to(gl.float32)
        if i >= RAGGED:
            z = gl.where(i * TILE + columns < body, z, float("-inf"))
        maximum, total = _fold(maximum, total, z, k)

    top = gl.max(maximum, axis=0)
    pivot = gl.where(top == float("-inf"), 0.0, top)
    rounded = pivot * k
    log2_sum = gl.log2(gl.sum(total * gl.exp2(gl.fma(maximum, k, -rounded)), axis=0))
    # Relative to the maximum itself: lse - x_target would lose digits when both are large.
    log_sum = (log2_sum - gl.fma(pivot, k, -rounded)) * LN2
    loss = (pivot - z_target) * scale + log_sum
    loss = gl.where(valid, loss, float("nan"))
    ignored = target == ignore_index
    lse = pivot * scale + log_sum
    gl.store(loss_ptr + row, gl.where(ignored, 0.0, loss))
    gl.store(lse_ptr + row, lse)

    a = gl.where(ignored, 0.0, gl.where(valid, a, float("nan")))
    upstream = a
    if HAS_LSE_SQUARE:
        square = gl.load(grad_lse_square_ptr + row.to(gl.int64) * grad_lse_square_stride).to(gl.float32)
        upstream += gl.where(ignored, 0.0, 2.0 * square * lse)
    factor = upstream * scale
    shift = rounded + log2_sum
    dtype: gl.constexpr = grad_ptr.dtype.element_ty
    if (upstream != 0.0) | (a != 0.0):
        for j in gl.static_range(TILES - 1, KEPT - 1, -1):
            z = gl.load(
                row_ptr + (j * TILE + columns), mask=j * TILE + columns < body, other=0.0, eviction_policy="evict_first"
            )
            grad = factor * gl.exp2(gl.fma(z.to(gl.float32), k, -shift))
            gl.store(
                out_row_ptr + (j * TILE + columns),
                grad.to(dtype),
                mask=j * TILE + columns < body,
                eviction_policy="evict_first",
            )
        for j in gl.static_range(KEPT - 1, -1, -1):
            z = kept.index(j).load(layout).to(gl.float32)
            grad = factor * gl.exp2(gl.fma(z, k, -shift))
            gl.store(
                out_row_ptr + (j * TILE + columns),
                grad.to(dtype),
                mask=j * TILE + columns < body,
                eviction_policy="evict_first",
            )
        if EDGES:
            grad = factor * gl.exp2(gl.fma(z_edge, k, -shift))
            gl.store(grad_ptr + out_offset + edge_columns, grad.to(dtype), mask=is_edge)
        barrier()  # the target's own element is written again, as in backward.py
        grad = factor * gl.exp2(gl.fma(z_target, k, -shift)) - a * scale
        gl.store(grad_ptr + out_offset + target, grad.to(dtype), mask=valid)
    else:  # exact zeros, whatever the logits hold
        zero = gl.full([LANES, VECTOR], 0.0, dtype, layout=layout)
        for j in gl.static_range(TILES):
            gl.store(out_row_ptr + (j * TILE + columns), zero, mask=j * TILE + columns < body)
        if EDGES:
            gl.store(grad_ptr + out_offset + edge_columns, gl.full([LANES], 0.0, dtype, layout=lanes), mask=is_edge)
