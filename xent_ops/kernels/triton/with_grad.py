"""Loss and gradient of a row in one program, and a later multiplication of the gradient by a factor."""

import triton
import triton.language as tl

from .backward import gradient, gradient_coefficients, store, tile_gradient
from .forward import scan
from .numerics import (
    LN2,
    activation_of,
    aligned_body,
    edge_columns,
    fold_low,
    row_offset,
    slope_unit,
    split_lse,
    weights_from,
    without_infinity,
)
from .row_outputs import finish, shift_of, target_logit


@triton.jit(
    do_not_specialize=["ignore_index"],
    do_not_specialize_on_alignment=["n_inner", "n_out_inner"],
)
def with_grad_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    grad_scale_ptr,  # (N,) with a stride, 0 for a scalar
    grad_lse_square_ptr,  # (N,) with a stride, 0 for a scalar
    weight_ptr,  # (V,) in the accumulator's dtype
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    argmax_ptr,  # (N,) int64
    entropy_ptr,  # (N,)
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
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    EDGES: tl.constexpr,  # as in numerics.aligned_body
    SAME_ROWS: tl.constexpr,  # logits and gradient have the same strides
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,  # elements in 16 bytes
):
    """One program per row: forwards for the sums, then backwards for the gradient, so that its reads hit the L2 cache.

    The gradient is of grad_scale * loss + grad_lse_square * lse^2; letters as in reference.cross_entropy_backward.
    """
    ACC: tl.constexpr = loss_ptr.dtype.element_ty
    row = tl.program_id(0)
    offset = row_offset(row, n_inner, stride_outer, stride_inner)
    out_offset = row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
    row_ptr = logits_ptr + offset
    label_smoothing = tl.cast(label_smoothing, ACC)
    act = activation_of(softcap, logit_scale, ACC)
    target = tl.load(target_ptr + row).to(tl.int64)
    ignored = target == ignore_index
    valid = (target >= 0) & (target < n_cols) & ~ignored
    shift = tl.cast(0.0, ACC)
    if FLAGS.smoothing:
        shift = shift_of(target_logit(row_ptr, target, valid, act, FLAGS), FLAGS)
    maximum, total, moment, smooth, weights, _top, first = scan(
        logits_ptr, offset, 0, tl.where(ignored, 0, n_cols), n_cols, weight_ptr, act, shift, FLAGS,
        EDGES, BLOCK, VECTOR, ACC, "evict_last",
    )  # fmt: skip
    x_target = target_logit(row_ptr, target, valid, act, FLAGS)
    finish(
        row, True, n_cols, target, valid, x_target, shift, maximum, total, moment, smooth, weights, first,
        weight_ptr, loss_ptr, lse_ptr, argmax_ptr, entropy_ptr, lse_ptr, ignore_index, label_smoothing, FLAGS,
    )  # fmt: skip
    lse, lse_low = split_lse(without_infinity(maximum), tl.log2(total) * LN2)

    a = tl.load(grad_scale_ptr + tl.cast(row, tl.int64) * grad_scale_stride).to(ACC)
    target_weight = tl.cast(0.0, ACC)
    if FLAGS.weight:
        target_weight = tl.load(weight_ptr + target, mask=valid, other=0.0)
    a, total, b, c = gradient_coefficients(
        a, target, valid, target_weight, weights, n_cols, ignore_index, label_smoothing, FLAGS
    )
    if FLAGS.lse_square:
        square = tl.load(grad_lse_square_ptr + tl.cast(row, tl.int64) * grad_lse_square_stride).to(ACC)
        total += tl.where(ignored, 0.0, 2.0 * square * lse)
    # A row without an upstream gradient gets exact zeros, whatever its logits hold.
    live = (total != 0.0) | (a != 0.0)
    unit = slope_unit(act, FLAGS)
    b *= unit
    c *= unit
    total, _, _ = fold_low(lse_low, total * unit, 0.0, 0.0)
    lse = tl.where(live, lse, 0.0)

    at_target = tl.load(row_ptr + target, mask=valid, other=0.0).to(ACC)
    # The gradient may be written over the logits: no thread may begin before all have read the target's logit.
    tl.debug_barrier()
    head, out_boundary, body = aligned_body(out_offset, n_cols, EDGES, VECTOR)
    boundary = out_boundary if SAME_ROWS else offset + head
    body_weight_ptr = weights_from(weight_ptr, head, n_cols, EDGES)
    n_blocks = tl.cdiv(body, BLOCK)
    zero = tl.cast(0.0, ACC)
    for block in tl.range(0, n_blocks):
        columns = (n_blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)  # the end of the row was read last
        pointers, out_pointers = logits_ptr + boundary + columns, grad_ptr + out_boundary + columns
        inside = columns < body
        tile_grad = tile_gradient(
            pointers, head + columns, inside, columns < tl.where(live, body, 0),
            body_weight_ptr + columns, lse, total, b, c, zero, zero, act, -1, FLAGS, False,
        )  # fmt: skip
        store(out_pointers, tile_grad, inside)
    if EDGES:
        edges, exist = edge_columns(head, body, n_cols, EDGES)
        pointers, out_pointers = logits_ptr + offset + edges, grad_ptr + out_offset + edges
        edge_gradient = tile_gradient(
            pointers, edges, exist, exist & (edges < tl.where(live, n_cols, 0)),
            weight_ptr + edges, lse, total, b, c, zero, zero, act, -1, FLAGS, False,
        )  # fmt: skip
        store(out_pointers, edge_gradient, exist)
    tl.debug_barrier()  # the target's own element is written again, as in backward.py
    grad, slope = gradient(
        at_target, lse, total, c, target_weight, zero, zero, act, FLAGS, False,
    )  # fmt: skip
    tl.store(grad_ptr + out_offset + target, ((grad - b) * slope).to(grad_ptr.dtype.element_ty), mask=valid & live)


@triton.jit(do_not_specialize=["n_tiles"], do_not_specialize_on_alignment=["n_blocks", "n_inner"])
def scale_kernel(
    grad_ptr,  # (outer, inner, V), rows of any stride; overwritten
    factor_ptr,  # (N,) with a stride, 0 for a scalar
    n_tiles: "i64",
    n_cols,
    n_blocks,  # tiles of a row
    n_inner,
    stride_outer,
    stride_inner,
    factor_stride,
    PER_ROW: tl.constexpr,  # one factor a row
    BLOCK: tl.constexpr,
):
    """Programs share the tiles. A tile with a factor of exactly 1 is neither read nor written."""
    ACC: tl.constexpr = tl.float64 if grad_ptr.dtype.element_ty == tl.float64 else tl.float32
    n_tiles = tl.cast(n_tiles, tl.int64)
    if not PER_ROW:
        n_tiles = tl.where(tl.load(factor_ptr) == 1.0, 0, n_tiles)
    for tile in tl.range(tl.cast(tl.program_id(0), tl.int64), n_tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) // n_blocks
        factor = tl.load(factor_ptr + row * factor_stride).to(ACC)
        if factor != 1.0:
            columns = tl.cast(tile - row * n_blocks, tl.int32) * BLOCK + tl.arange(0, BLOCK)
            pointers = grad_ptr + row_offset(row, n_inner, stride_outer, stride_inner) + columns
            grad = tl.load(pointers, mask=columns < tl.where(factor == 0.0, 0, n_cols), other=0.0).to(ACC)
            grad = tl.where(factor == 0.0, 0.0, grad * factor)
            tl.store(pointers, grad.to(grad_ptr.dtype.element_ty), mask=columns < n_cols)
