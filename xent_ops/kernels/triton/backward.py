"""The gradient of the row operator. Each element is read once and written once."""

import triton
import triton.language as tl

from .numerics import (
    LN2,
    LOG2E,
    activate,
    activation_of,
    aligned_body,
    bounded,
    edge_columns,
    fold_low,
    row_offset,
    slope_unit,
    tanh_residual,
    tanh_slope,
    weights_from,
)


@triton.jit
def gradient_coefficients(
    a,  # upstream gradient of the loss
    target,
    valid,  # whether the target is a class
    target_weight,
    sum_weights,  # not read without class weights
    n_classes,
    ignore_index,
    label_smoothing,
    FLAGS: tl.constexpr,
):
    """a with ignored and invalid rows resolved; A (without grad_lse), B, C of reference.cross_entropy_backward."""
    a = tl.where(valid, a, float("nan"))
    a = tl.where(target == ignore_index, 0.0, a)
    b = a
    if FLAGS.smoothing:
        b *= 1.0 - label_smoothing
    if FLAGS.weight:
        b *= tl.where(target == ignore_index, 0.0, target_weight)  # the weight of an ignored class may be infinite
    total = b
    c = a * (label_smoothing / n_classes)
    if FLAGS.smoothing:
        total += c * (sum_weights if FLAGS.weight else tl.cast(n_classes, a.dtype))
    return a, total, b, c


@triton.jit
def gradient(
    z,  # logits, in the accumulator's dtype
    lse,
    total,  # A, B, C of reference.cross_entropy_backward
    c,
    weight,
    entropy,
    grad_entropy,
    act,
    FLAGS: tl.constexpr,
    TILE: tl.constexpr,  # as in numerics.tanh_residual
):
    """(A softmax_j - C w_j, derivative of the activation): the gradient of a column, without B at the target.

    A, B and C have been multiplied by slope_unit, and the derivative is relative to that.
    """
    if FLAGS.softcap == 2:
        residual = tanh_residual(z, act, TILE)
        log_p = bounded(residual, act, lse)
        p = tl.exp2(log_p)
        log_p *= LN2
        slope = residual - residual * residual
    else:
        x = activate(z, act, FLAGS)
        log_p = x - lse
        p = tl.exp2(log_p * LOG2E)
        slope = 1.0
        if FLAGS.softcap:
            slope = tanh_slope(x, act)
    grad = total * p
    if FLAGS.entropy:
        grad -= tl.where(p == 0.0, 0.0, grad_entropy * p * (log_p + entropy))
    if FLAGS.smoothing:
        if FLAGS.weight:
            grad -= c * weight
        else:
            grad -= c
    return grad, slope


@triton.jit
def tile_gradient(
    pointers,  # into the logits of a row
    columns,
    inside,  # columns that exist
    read,  # columns that are read: none in a row without an upstream gradient
    weight_pointers,  # of these columns
    lse,
    total,
    b,
    c,
    entropy,
    grad_entropy,
    act,
    target,  # its column; -1 for none, or where the caller writes it afterwards
    FLAGS: tl.constexpr,
    COMPARE: tl.constexpr,  # whether there may be a target
):
    """The gradient of one tile, in the accumulator's dtype."""
    z = tl.load(pointers, mask=read, other=0.0).to(lse.dtype)
    weight = 0.0
    if FLAGS.smoothing and FLAGS.weight:
        weight = tl.load(weight_pointers, mask=inside, other=0.0)
    grad, slope = gradient(
        z, lse, total, c, weight, entropy, grad_entropy, act, FLAGS, True,
    )  # fmt: skip
    if COMPARE:
        grad -= tl.where(columns == target, b, 0.0)
    return grad * slope


@triton.jit
def store(pointers, grad, inside):
    tl.store(pointers, grad.to(pointers.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit(
    do_not_specialize=["class_start", "n_classes", "ignore_index"],
    do_not_specialize_on_alignment=["n_inner", "n_out_inner", "n_blocks"],
)
def backward_kernel(
    grad_loss_ptr,  # (N,) with a stride, 0 for an expanded scalar
    divisor_ptr,  # (2,): divides the gradients of a row's loss and of its z-loss
    grad_lse_ptr,  # (N,) with a stride
    grad_entropy_ptr,  # (N,) with a stride
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    lse_ptr,  # (N,)
    lse_low_ptr,  # (N,): what the lse's rounding took
    entropy_ptr,  # (N,)
    weight_ptr,  # (V,) in the accumulator's dtype
    weight_sum_ptr,  # (1,); shard: (N,), the lse_coefficient of cross_entropy_shard_join
    grad_ptr,  # (outer, inner, V): may be the logits themselves
    n_cols,
    n_blocks,
    n_inner,
    stride_outer,
    stride_inner,
    n_out_inner,
    out_stride_outer,
    out_stride_inner,
    grad_loss_stride,
    grad_lse_stride,
    grad_entropy_stride,
    class_start: "i64",  # shard: the class of the first column
    n_classes: "i64",  # shard: of all shards together
    ignore_index: "i64",
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    lse_square_scale: "fp64",
    FLAGS: tl.constexpr,
    EDGES: tl.constexpr,  # as in numerics.aligned_body
    SAME_ROWS: tl.constexpr,  # logits and gradient have the same strides
    COMPARE: tl.constexpr,  # compare columns with the target; else its element is written again at the end
    NARROW: tl.constexpr,  # the gradient has fewer bytes and is written over the logits' first: one program a row
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # of BLOCK columns, that a program computes
    VECTOR: tl.constexpr,  # elements in 16 bytes
):
    """grad_x_j = A softmax_j - B [j == t] - C w_j; A, B, C as in reference.cross_entropy_backward."""
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    # The last row first: the forward read it last, so it is still in the L2 cache, and nothing evicts it before it is
    # read here (stores are evicted first). 131072 x 1024, compiled: 1.58 copies; in the other order 1.73.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = program // n_blocks
    start = (program - row * n_blocks) * (BLOCK * TILES)
    label_smoothing = tl.cast(label_smoothing, ACC)
    act = activation_of(softcap, logit_scale, ACC)

    target = tl.load(target_ptr + row).to(tl.int64)
    total_classes = n_cols
    if FLAGS.shard:
        total_classes = tl.cast(n_classes, tl.int64)
    valid = (target >= 0) & (target < total_classes)
    lse = tl.load(lse_ptr + row)
    a = tl.load(grad_loss_ptr + tl.cast(row, tl.int64) * grad_loss_stride).to(ACC)
    grad_square = a
    if FLAGS.divisor:
        if FLAGS.lse_square:
            grad_square /= tl.load(divisor_ptr + 1).to(ACC)
        a /= tl.load(divisor_ptr).to(ACC)
    column = target
    owned = valid
    if FLAGS.shard:
        column = target - class_start
        owned = (column >= 0) & (column < n_cols)
    target_weight = tl.cast(0.0, ACC)
    sum_weights = tl.cast(0.0, ACC)
    if FLAGS.weight:
        target_weight = tl.load(weight_ptr + column, mask=owned, other=0.0)
        if FLAGS.smoothing:
            sum_weights = tl.load(weight_sum_ptr)
    a, total, b, c = gradient_coefficients(
        a, target, valid, target_weight, sum_weights, total_classes, ignore_index, label_smoothing, FLAGS,
    )  # fmt: skip
    if FLAGS.shard:
        total = a * tl.load(weight_sum_ptr + row) if FLAGS.weight else a
    grad_lse = tl.cast(0.0, ACC)
    if FLAGS.grad_lse:
        grad_lse = tl.load(grad_lse_ptr + tl.cast(row, tl.int64) * grad_lse_stride).to(ACC)
    if FLAGS.lse_square:
        grad_square *= 2.0 * tl.cast(lse_square_scale, ACC)
        # The where comes last: without a counted row the divisor is 0.
        grad_lse += tl.where(target == ignore_index, 0.0, lse * grad_square)
    if FLAGS.grad_lse or FLAGS.lse_square:
        total += grad_lse
    # A row without an upstream gradient is not read: exact zeros for any logits. Class weights do not decide this,
    # because the loads of logits would then wait for them.
    live = a != 0.0
    if FLAGS.grad_lse or FLAGS.lse_square:
        live |= grad_lse != 0.0
    grad_entropy = 0.0
    entropy = 0.0
    if FLAGS.entropy:
        grad_entropy = tl.load(grad_entropy_ptr + tl.cast(row, tl.int64) * grad_entropy_stride).to(ACC)
        grad_entropy = tl.where(target == ignore_index, 0.0, grad_entropy)
        entropy = tl.load(entropy_ptr + row)
        live |= grad_entropy != 0.0
        entropy = tl.where(live, entropy, 0.0)
    unit = slope_unit(act, FLAGS)
    total *= unit
    b *= unit
    c *= unit
    grad_entropy *= unit
    if FLAGS.lse_low:
        total, entropy, grad_entropy = fold_low(tl.load(lse_low_ptr + row), total, entropy, grad_entropy)
    lse = tl.where(live, lse, 0.0)  # A, B and C are 0 too, so columns that are not read give 0

    offset = row_offset(row, n_inner, stride_outer, stride_inner)
    out_offset = row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
    head, out_boundary, body = aligned_body(out_offset, n_cols, EDGES, VECTOR)
    boundary = out_boundary if SAME_ROWS else offset + head
    # Comparing each column with the target takes a fifth of the kernel's instructions. If a row has many tiles, the
    # target's element is written again after its tile instead, and few programs wait at the two barriers. The barriers
    # order it with the tile's other threads: it is read before they write (the gradient may lie over the logits), and
    # written after them.
    compared = tl.where(owned, column, -1).to(tl.int32)
    if not COMPARE:
        position = column - head
        in_tile = (position >= start) & (position < tl.minimum(start + BLOCK * TILES, body))
        in_edges = (EDGES > 0) & (start == 0) & ((position < 0) | (position >= body))
        has_target = live & owned & (in_tile | in_edges)
        at_target = tl.load(logits_ptr + offset + column, mask=has_target, other=0.0).to(ACC)
        if has_target:
            tl.debug_barrier()
    body_weight_ptr = weights_from(weight_ptr, head, n_cols, EDGES)
    if EDGES and NARROW:  # read before they are overwritten
        edges, exist = edge_columns(head, body, n_cols, EDGES)
        edge_gradient = tile_gradient(
            logits_ptr + offset + edges, edges, exist, exist & (edges < tl.where(live, n_cols, 0)), weight_ptr + edges,
            lse, total, b, c, entropy, grad_entropy, act, compared, FLAGS, COMPARE,
        )  # fmt: skip
    for tile in tl.range(0, TILES):
        columns = start + tile * BLOCK + tl.arange(0, BLOCK)
        pointers, out_pointers = logits_ptr + boundary + columns, grad_ptr + out_boundary + columns
        inside = columns < body
        tile_grad = tile_gradient(
            pointers, head + columns, inside, columns < tl.where(live, body, 0),
            body_weight_ptr + columns, lse, total, b, c, entropy, grad_entropy, act, compared, FLAGS, COMPARE,
        )  # fmt: skip
        if NARROW:
            tl.debug_barrier()  # all threads have read this tile; the gradient is written to it or before it
        store(out_pointers, tile_grad, inside)
    if EDGES and NARROW:
        store(grad_ptr + out_offset + edges, edge_gradient, exist)
    elif EDGES:  # noqa: SIM102 (a constexpr; start is not)
        if start == 0:
            edges, exist = edge_columns(head, body, n_cols, EDGES)
            pointers, out_pointers = logits_ptr + offset + edges, grad_ptr + out_offset + edges
            edge_gradient = tile_gradient(
                pointers, edges, exist, exist & (edges < tl.where(live, n_cols, 0)),
                weight_ptr + edges, lse, total, b, c, entropy, grad_entropy, act, compared, FLAGS, COMPARE,
            )  # fmt: skip
            store(out_pointers, edge_gradient, exist)
    if not COMPARE:  # noqa: SIM102
        if has_target:
            tl.debug_barrier()
            grad, slope = gradient(
                at_target, lse, total, c, target_weight, entropy, grad_entropy, act, FLAGS, False,
            )  # fmt: skip
            tl.store(grad_ptr + out_offset + column, ((grad - b) * slope).to(grad_ptr.dtype.element_ty))
