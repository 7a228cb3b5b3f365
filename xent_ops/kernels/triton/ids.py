"""Several classes a row: their x, and their columns in the gradient. kernels/reference_ids.py has the formulas."""

import triton
import triton.language as tl

from .numerics import activation_of, row_offset
from .row_outputs import target_logit


@triton.jit(do_not_specialize=["ignore_index"])
def row_targets_kernel(
    ids_ptr,  # (N, K), contiguous, any integer dtype
    target_ptr,  # (N,), written
    n_ids,
    ignore_index: "i64",
    WIDTH: tl.constexpr,  # K, rounded up to a power of two
):
    """One program a row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    position = tl.arange(0, WIDTH)
    ids = tl.load(ids_ptr + row * n_ids + position, mask=position < n_ids, other=0).to(tl.int64)
    counted = (position < n_ids) & (ids != ignore_index)
    smallest = tl.min(tl.where(counted, ids, 0), axis=0)
    largest = tl.max(tl.where(counted, ids, -1), axis=0)
    target = tl.where(smallest < 0, smallest, tl.where(largest < 0, ignore_index, largest))
    tl.store(target_ptr + row, target)


@triton.jit(do_not_specialize=["ignore_index", "class_start", "n_classes"], do_not_specialize_on_alignment=["n_inner"])
def ids_forward_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    ids_ptr,  # (N, K), contiguous, any integer dtype
    at_ids_ptr,  # (N, K), written
    n_cols,
    n_ids,
    n_inner,
    stride_outer,
    stride_inner,
    class_start: "i64",
    n_classes: "i64",
    ignore_index: "i64",
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    MASK: tl.constexpr,  # 1 or -1: the columns of the ids become MASK times infinity; 0: they stay
    WIDTH: tl.constexpr,  # K, rounded up to a power of two
):
    """One program a row."""
    ACC: tl.constexpr = at_ids_ptr.dtype.element_ty
    row = tl.program_id(0)
    position = tl.arange(0, WIDTH)
    exists = position < n_ids
    place = tl.cast(row, tl.int64) * n_ids + position
    ids = tl.load(ids_ptr + place, mask=exists, other=0).to(tl.int64)
    counted = exists & (ids != ignore_index)
    column = ids - class_start
    here = counted & (column >= 0) & (column < n_cols)
    row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    x = tl.where(here, target_logit(row_ptr, column, here, activation_of(softcap, logit_scale, ACC), FLAGS), 0.0)
    x = tl.where(counted & ((ids < 0) | (ids >= n_classes)), float("nan"), x)
    tl.store(at_ids_ptr + place, x, mask=exists)
    if MASK:
        tl.debug_barrier()  # an equal id has been read too
        tl.store(row_ptr + column, tl.cast(MASK * float("inf"), logits_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["ignore_index", "class_start"], do_not_specialize_on_alignment=["n_inner"])
def ids_grad_kernel(
    grad_ptr,  # (outer, inner, V), rows of any stride; the other columns are already written
    ids_ptr,  # (N, K), contiguous, any integer dtype
    at_ids_ptr,  # (N, K) with strides, any dtype, as the next five
    grad_ids_ptr,  # (N, K), contiguous
    grad_lse_ptr,  # (N,), contiguous
    lse_ptr,  # (N,)
    grad_entropy_ptr,  # (N,)
    entropy_ptr,  # (N,)
    n_cols,
    n_ids,
    n_inner,
    stride_outer,
    stride_inner,
    at_stride_row,
    at_stride_id,
    class_start: "i64",
    ignore_index: "i64",
    softcap: "fp64",
    logit_scale: "fp64",
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    WIDTH: tl.constexpr,  # K, rounded up to a power of two
    STEP: tl.constexpr,  # ids that are compared with all others at a time
):
    """One program a row. Equal ids write equal numbers: each adds up the gradients of all of them, in one order."""
    ACC: tl.constexpr = tl.float64 if lse_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0)
    offset = tl.cast(row, tl.int64) * n_ids
    position = tl.arange(0, WIDTH)
    exists = position < n_ids
    ids = tl.load(ids_ptr + offset + position, mask=exists, other=0).to(tl.int64)
    here = exists & (ids != ignore_index) & (ids >= class_start) & (ids - class_start < n_cols)
    at_place = tl.cast(row, tl.int64) * at_stride_row + position * at_stride_id
    x = tl.load(at_ids_ptr + at_place, mask=here, other=0.0).to(ACC)
    passed = tl.zeros([WIDTH], ACC)
    for start in tl.range(0, n_ids, STEP):
        other = start + tl.arange(0, STEP)
        inside = other < n_ids
        other_ids = tl.load(ids_ptr + offset + other, mask=inside, other=0).to(tl.int64)
        values = tl.load(grad_ids_ptr + offset + other, mask=inside, other=0.0).to(ACC)
        same = (ids[:, None] == other_ids[None, :]) & inside[None, :]
        passed += tl.sum(tl.where(same, values[None, :], 0.0), axis=1)
    log_p = x - tl.load(lse_ptr + row).to(ACC)
    p = tl.exp(log_p)
    b = tl.load(grad_lse_ptr + row).to(ACC)
    grad = b * p
    live = b != 0.0
    if HAS_ENTROPY:
        c = tl.load(grad_entropy_ptr + row).to(ACC)
        term = p * (log_p + tl.load(entropy_ptr + row).to(ACC))
        grad -= tl.where(p == 0.0, 0.0, c * term)
        live |= c != 0.0
    slope = tl.cast(logit_scale, ACC)
    if HAS_SOFTCAP:
        share = x / tl.cast(softcap, ACC)
        slope = slope * (1.0 - share * share)
    grad = tl.where(live, grad, 0.0) + passed
    grad = tl.where(grad != 0.0, grad * slope, 0.0)  # exact zeros without an upstream gradient, whatever x is
    row_ptr = grad_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    tl.store(row_ptr + (ids - class_start), grad.to(grad_ptr.dtype.element_ty), mask=here)


@triton.jit
def _times(values, factor):
    """A factor of 0 leaves out a NaN."""
    return tl.where(factor == 0.0, 0.0, values * factor)


@triton.jit(do_not_specialize=["ignore_index"])
def top_k_distillation_kernel(
    at_ids_ptr,  # (N, K) with strides, any dtype
    lse_ptr,  # (N,)
    ids_ptr,  # (N, K), contiguous, any integer dtype
    probs_ptr,  # (N, K), contiguous, any dtype
    token_ptr,  # (N,), any dtype; not read without WEIGHTED
    lse_low_ptr,  # (N,); not read without LSE_LOW
    loss_ptr,  # (N,), written, as the next two
    grad_ids_ptr,  # (N, K)
    grad_lse_ptr,  # (N,)
    n_ids,
    stride_row,
    stride_id,
    ignore_index: "i64",
    most: "fp64",  # the largest sum of probabilities, of no entropy
    most_per_nat: "fp64",
    lse_square_scale: "fp64",
    TAIL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    LSE_LOW: tl.constexpr,
    LSE_SQUARE: tl.constexpr,
    WIDTH: tl.constexpr,  # K, rounded up to a power of two
    STEP: tl.constexpr,  # ids that are compared with all others at a time
):
    """One program a row: reference_top_k_distillation.top_k_distillation."""
    ACC: tl.constexpr = tl.float64 if loss_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.cast(tl.program_id(0), tl.int64)
    position = tl.arange(0, WIDTH)
    exists = position < n_ids
    place = row * n_ids + position
    ids = tl.load(ids_ptr + place, mask=exists, other=0).to(tl.int64)
    counted = exists & (ids != ignore_index)
    any_counted = tl.max(counted.to(tl.int32), axis=0) > 0
    probs = tl.load(probs_ptr + place, mask=counted, other=0.0).to(ACC)
    total = tl.sum(probs, axis=0)
    right = total >= 0.0  # not if it is NaN
    rest = tl.cast(0.0, ACC)
    if TAIL:
        entropy = -tl.sum(tl.where(probs > 0.0, probs * tl.log(probs), 0.0), axis=0)
        right &= total <= most + most_per_nat * entropy
        rest = tl.where(any_counted & right, tl.maximum(1.0 - total, 0.0), rest)
    probs = tl.where(right, probs, float("nan"))
    z_factor = tl.where(any_counted, 1.0, 0.0).to(ACC)
    if WEIGHTED:
        z_factor = tl.load(token_ptr + row, mask=any_counted, other=0.0).to(ACC)
        probs, rest = _times(probs, z_factor), _times(rest, z_factor)
    x = tl.load(at_ids_ptr + row * stride_row + position * stride_id, mask=exists, other=0.0).to(ACC)
    lse = tl.load(lse_ptr + row).to(ACC)
    low = tl.cast(0.0, ACC)
    if LSE_LOW:
        low = tl.load(lse_low_ptr + row).to(ACC)
    if TAIL:
        rest = tl.where(lse == float("-inf"), 0.0, rest)
        first = counted
        for start in tl.range(0, n_ids, STEP):
            other = start + tl.arange(0, STEP)
            other_ids = tl.load(ids_ptr + row * n_ids + other, mask=other < n_ids, other=0).to(tl.int64)
            earlier = (ids[:, None] == other_ids[None, :]) & (other[None, :] < position[:, None])
            first &= tl.max(earlier.to(tl.int32), axis=1) == 0
        different = tl.where(first, x, float("-inf"))
        largest = tl.max(different, axis=0)
        # A NaN stays one, as in torch's amax.
        shift = tl.where((lse >= largest) | (lse != lse), lse, largest)
        shift = tl.where(tl.max((different != different).to(tl.int32), axis=0) > 0, float("nan"), shift)
        log_rest = (lse - shift) + low
        share, share_of_rest = tl.exp(different - shift), tl.exp(log_rest)
        sum_of_shares = tl.sum(share, axis=0) + share_of_rest
        log_sum = tl.log(sum_of_shares)
        log_p, log_rest = x - shift - log_sum, log_rest - log_sum
        lse = shift + log_sum
    else:
        log_p = (x - lse) - low
    losses = tl.where(probs == 0.0, 0.0, probs * log_p)
    loss = -tl.sum(tl.where(exists, losses, 0.0), axis=0)
    total = tl.sum(tl.where(exists, probs, 0.0), axis=0)
    if TAIL:
        loss -= tl.where(rest == 0.0, 0.0, rest * log_rest)
        total += rest
    if LSE_SQUARE:
        z_factor *= tl.cast(lse_square_scale, ACC)
        loss += _times(lse * lse, z_factor)
        total += _times(2.0 * lse, z_factor)
    if TAIL:
        grad_ids = _times(share / sum_of_shares, total) - probs
        grad_lse = _times(share_of_rest / sum_of_shares, total) - rest
    else:
        grad_ids, grad_lse = -probs, total
    tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty))
    tl.store(grad_ids_ptr + place, grad_ids.to(loss_ptr.dtype.element_ty), mask=exists)
    tl.store(grad_lse_ptr + row, grad_lse.to(loss_ptr.dtype.element_ty))
