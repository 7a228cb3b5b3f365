"""The columns of several classes a row in the gradient of the logits: kernels/reference_ids.py has the formula."""

import triton
import triton.language as tl

from .numerics import row_offset


@triton.jit(do_not_specialize=["ignore_index", "class_start"], do_not_specialize_on_alignment=["n_inner"])
def ids_grad_kernel(
    grad_ptr,  # (outer, inner, V), rows of any stride; the other columns are already written
    ids_ptr,  # (N, K), contiguous, any integer dtype
    at_ids_ptr,  # (N, K), contiguous, any dtype, as the next five
    grad_ids_ptr,
    grad_lse_ptr,  # (N,), contiguous
    lse_ptr,  # (N,)
    grad_entropy_ptr,  # (N,)
    entropy_ptr,  # (N,)
    n_cols,
    n_ids,
    n_inner,
    stride_outer,
    stride_inner,
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
    x = tl.load(at_ids_ptr + offset + position, mask=here, other=0.0).to(ACC)
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
