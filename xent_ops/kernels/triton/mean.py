"""The mean of row losses in a launch or two: plain torch takes five to nine, which the host needs longer for."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows", "ignore_index"])
def mean_kernel(
    loss_ptr,  # (N,); not read without HAS_LOSS, which stands for a sum of 1
    row_ptr,  # (N,): the target of each row; ROW_WEIGHTS: how much it counts, in the accumulator's dtype
    mean_ptr,  # (programs,): the sum of a program's losses divided by what its rows count
    divisor_ptr,  # (programs,): what they count
    n_rows: "i64",
    ignore_index: "i64",
    HAS_LOSS: tl.constexpr,
    ROW_WEIGHTS: tl.constexpr,
    PARTIAL: tl.constexpr,  # the sum is not divided: one of several programs' part
    BLOCK: tl.constexpr,
):
    """The sums have one order, whatever runs first. Without a row that counts the mean is NaN."""
    ACC: tl.constexpr = divisor_ptr.dtype.element_ty
    program = tl.cast(tl.program_id(0), tl.int64)
    total = tl.zeros([BLOCK], ACC)
    count = tl.zeros([BLOCK], ACC)
    for start in tl.range(program * BLOCK, n_rows, tl.num_programs(0) * BLOCK):
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
    tl.store(divisor_ptr + program, divisor)
    mean = tl.sum(total, axis=0) if HAS_LOSS else tl.cast(1.0, ACC)
    if not PARTIAL:
        mean /= divisor
    tl.store(mean_ptr + program, mean)
