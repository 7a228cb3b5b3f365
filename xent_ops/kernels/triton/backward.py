"""The gradient of the row operator: each element read once and written once."""

import triton
import triton.language as tl

from .numerics import LOG2E, activate, aligned_body, edge_columns, row_offset


@triton.jit
def _write(
    pointers,  # into the logits of a row
    out_pointers,  # into its gradient
    columns,
    inside,  # which columns exist
    read,  # which of them are read: none in a row that passes nothing back
    weight_ptr,
    target,
    lse,
    total,  # A, B, C of reference.row_coefficients
    b,
    c,
    entropy,
    grad_entropy,
    live,
    logit_scale,
    softcap,
    HAS_ENTROPY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """The gradient of one tile."""
    z = tl.load(pointers, mask=read, other=0.0, eviction_policy="evict_first")
    x = activate(z.to(lse.dtype) * logit_scale, softcap, HAS_SOFTCAP)
    log_p = x - lse
    p = tl.exp2(log_p * LOG2E)
    grad = total * p
    if HAS_ENTROPY:
        grad -= tl.where(p == 0.0, 0.0, grad_entropy * p * (log_p + entropy))
    grad -= tl.where(columns == target.to(tl.int32), b, 0.0)
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            grad -= c * tl.load(weight_ptr + columns, mask=inside, other=0.0)
        else:
            grad -= c
    if HAS_SOFTCAP:
        ratio = x * (1.0 / softcap)
        grad *= 1.0 - ratio * ratio
    grad = tl.where(live, grad * logit_scale, 0.0)
    tl.store(out_pointers, grad.to(out_pointers.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit(
    do_not_specialize=[
        "n_inner", "n_out_inner", "n_blocks", "class_start", "n_classes", "ignore_index", "label_smoothing", "softcap",
        "logit_scale",
    ]
)  # fmt: skip
def backward_kernel(
    grad_loss_ptr,  # (N,) with a stride, 0 for an expanded scalar
    grad_lse_ptr,  # (N,) likewise
    grad_entropy_ptr,  # (N,) likewise
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    lse_ptr,  # (N,)
    entropy_ptr,  # (N,)
    weight_ptr,  # (V,) in the accumulator's dtype
    weight_sum_ptr,  # (1,); SHARD: (N,), the coefficients of reference_shard.py
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
    class_start: "i64",  # SHARD: the class of the first column
    n_classes: "i64",  # SHARD: of all shards together
    ignore_index: "i64",
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    HAS_GRAD_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EDGES: tl.constexpr,  # rows do not all start and end on 16-byte boundaries
    SAME_ROWS: tl.constexpr,  # logits and gradient have the same strides
    SHARD: tl.constexpr,  # the columns are some of the classes; targets count from the first class of all
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,  # elements in 16 bytes
):
    """grad_x_j = A softmax_j - B [j == t] - C w_j; A, B, C as in reference.row_coefficients. A program is a tile."""
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    program = tl.program_id(0)
    row = program // n_blocks
    start = (program - row * n_blocks) * BLOCK
    label_smoothing = tl.cast(label_smoothing, ACC)
    softcap = tl.cast(softcap, ACC)
    logit_scale = tl.cast(logit_scale, ACC)

    target = tl.load(target_ptr + row).to(tl.int64)
    total_classes = n_cols
    if SHARD:
        total_classes = tl.cast(n_classes, tl.int64)
    valid = (target >= 0) & (target < total_classes)
    lse = tl.load(lse_ptr + row)
    a = tl.load(grad_loss_ptr + tl.cast(row, tl.int64) * grad_loss_stride).to(ACC)
    a = tl.where(valid, a, float("nan"))
    a = tl.where(target == ignore_index, 0.0, a)
    if SHARD:
        target -= class_start
        valid = (target >= 0) & (target < n_cols)
        target = tl.where(valid, target, -1)  # no column; the difference may not fit the columns' int32
    b = a
    if HAS_SMOOTHING:
        b *= 1.0 - label_smoothing
    if HAS_WEIGHT:
        b *= tl.load(weight_ptr + target, mask=valid, other=0.0)
    total = b
    c = a * (label_smoothing / total_classes)
    if SHARD:
        total = a * tl.load(weight_sum_ptr + row) if HAS_WEIGHT else a
    elif HAS_SMOOTHING:
        total += c * (tl.load(weight_sum_ptr) if HAS_WEIGHT else tl.cast(n_cols, ACC))
    if HAS_GRAD_LSE:
        total += tl.load(grad_lse_ptr + tl.cast(row, tl.int64) * grad_lse_stride).to(ACC)
    # A row that passes nothing back (ignored, or weighted with 0) is not read: exact zeros, whatever its logits hold.
    live = (total != 0.0) | (a != 0.0)
    grad_entropy = 0.0
    entropy = 0.0
    if HAS_ENTROPY:
        grad_entropy = tl.load(grad_entropy_ptr + tl.cast(row, tl.int64) * grad_entropy_stride).to(ACC)
        entropy = tl.load(entropy_ptr + row)
        live |= grad_entropy != 0.0

    offset = row_offset(row, n_inner, stride_outer, stride_inner)
    out_offset = row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
    head, out_boundary, body = aligned_body(out_offset, n_cols, EDGES, VECTOR)
    boundary = out_boundary if SAME_ROWS else offset + head
    columns = start + tl.arange(0, BLOCK)
    _write(
        logits_ptr + boundary + columns, grad_ptr + out_boundary + columns, head + columns, columns < body,
        columns < tl.where(live, body, 0), weight_ptr, target, lse, total, b, c, entropy, grad_entropy, live,
        logit_scale, softcap, HAS_ENTROPY, HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP,
    )  # fmt: skip
    if EDGES:  # noqa: SIM102 (known when compiling, the next when running)
        if start == 0:
            edges, exist = edge_columns(head, body, n_cols, VECTOR)
            _write(
                logits_ptr + offset + edges, grad_ptr + out_offset + edges, edges, exist,
                exist & (edges < tl.where(live, n_cols, 0)), weight_ptr, target, lse, total, b, c, entropy,
                grad_entropy, live, logit_scale, softcap, HAS_ENTROPY, HAS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP,
            )  # fmt: skip
