"""The mean of row losses in one launch: plain torch takes five, and each takes the host longer than the GPU."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def mean_kernel(
    loss_ptr,  # (N,); not read without HAS_LOSS
    row_ptr,  # (N,): the target of each row; ROW_WEIGHTS: how much it counts, in the accumulator's dtype
    mean_ptr,  # (): the sum of the losses divided by what the rows count; not written without HAS_LOSS
    divisor_ptr,  # (): what the rows count
    n_rows: "i64",
    ignore_index: "i64",
    HAS_LOSS: tl.constexpr,
    ROW_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, so that the sums have one order. Without a row that counts the mean is NaN."""
    ACC: tl.constexpr = divisor_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], ACC)
    count = tl.zeros([BLOCK], ACC)
    for start in tl.range(0, n_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < n_rows
        if HAS_LOSS:
            total += tl.load(loss_ptr + rows, mask=inside, other=0.0)
        if ROW_WEIGHTS:
            count += tl.load(row_ptr + rows, mask=inside, other=0.0)
        else:
            target = tl.load(row_ptr + rows, mask=inside, other=0).to(tl.int64)
            count += tl.where(inside & (target != ignore_index), 1.0, 0.0).to(ACC)
    divisor = tl.sum(count, axis=0)
    tl.store(divisor_ptr, divisor)
    if HAS_LOSS:
        tl.store(mean_ptr, tl.sum(total, axis=0) / divisor)
