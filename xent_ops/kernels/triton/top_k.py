"""The k largest classes of each row, and the number of classes before its target: kernels/reference_top_k.py.

Logits are compared as integers, their keys. Integers have a total order, and a search for the k-th largest of them
takes one step for each bit, whatever k is.
"""

import triton
import triton.language as tl

from .numerics import row_offset

LOWEST = tl.constexpr(-2147483648)  # below every key


@triton.jit
def _key(z, INCREASING: tl.constexpr):
    """An integer in the order of the logits: equal for 0 and -0, the largest for NaN."""
    x = z.to(tl.float32) if INCREASING else -z.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(x == x, tl.where(bits < 0, -magnitude, magnitude), 0x7FFF0000)


@triton.jit
def _visit(
    before,  # (WIDTH // BLOCK, BLOCK): how many columns of the tiles before this one are before the target
    row_ptr,
    keys_ptr,
    start,
    n_cols,
    own,
    target,
    MASKED: tl.constexpr,
    INCREASING: tl.constexpr,
    WITH_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.arange(0, WIDTH // BLOCK)
    columns = start + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if MASKED:
        inside = columns < n_cols
        key = tl.where(inside, _key(tl.load(row_ptr + columns, mask=inside, other=0.0), INCREASING), LOWEST)
    else:
        key = _key(tl.load(row_ptr + columns), INCREASING)
    place = start // BLOCK + block
    tl.store(keys_ptr + place, tl.max(key, axis=1), mask=place * BLOCK < n_cols)
    if WITH_RANK:
        before += ((key > own) | ((key == own) & (columns < target))).to(tl.int32)
    return before


@triton.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=["n_inner"])
def block_keys_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    own_ptr,  # (N,): the target's logit, if OWN
    keys_ptr,  # (N, n_blocks), int32
    rank_ptr,  # (N,), int64
    n_cols,
    n_blocks,
    n_inner,
    stride_outer,
    stride_inner,
    ignore_index: "i64",
    INCREASING: tl.constexpr,
    WITH_RANK: tl.constexpr,
    OWN: tl.constexpr,  # the columns are a slice of the classes, and the target may be any column
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: the largest key of each block of classes, and the rank of the target, in one read."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    keys_ptr += tl.cast(row, tl.int64) * n_blocks
    target = tl.cast(0, tl.int64)
    own = tl.cast(0, tl.int32)
    if WITH_RANK:
        target = tl.load(target_ptr + row).to(tl.int64)
        valid = OWN | ((target != ignore_index) & (target >= 0) & (target < n_cols))
        if OWN:
            own = _key(tl.load(own_ptr + row), INCREASING)
        else:
            own = _key(tl.load(row_ptr + target, mask=valid, other=0.0), INCREASING)
    before = tl.zeros([WIDTH // BLOCK, BLOCK], tl.int32)
    n_full = n_cols // WIDTH * WIDTH
    for start in tl.range(0, n_full, WIDTH):
        before = _visit(
            before, row_ptr, keys_ptr, start, n_cols, own, target, False, INCREASING, WITH_RANK, WIDTH, BLOCK
        )
    if n_full < n_cols:
        before = _visit(
            before, row_ptr, keys_ptr, n_full, n_cols, own, target, True, INCREASING, WITH_RANK, WIDTH, BLOCK
        )
    if WITH_RANK:
        tl.store(rank_ptr + row, tl.where(valid, tl.sum(tl.sum(before, axis=1), axis=0), -1).to(tl.int64))


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["n_inner"])
def choose_kernel(
    values_ptr,  # (outer, inner, n_cols), rows of any stride: logits, or keys
    blocks_ptr,  # (N, k) int32, ascending: blocks of columns to choose from, if BLOCK is not 0
    chosen_ptr,  # (N, k) int32
    n_cols,
    n_candidates,
    k,
    n_inner,
    stride_outer,
    stride_inner,
    INCREASING: tl.constexpr,
    BLOCK: tl.constexpr,  # 0: all columns are candidates
    SIZE: tl.constexpr,  # n_candidates or more, a power of two up to 2^14
    STEPS: tl.constexpr,  # the highest bits of a key without the sign; the others are 0
):
    """One program a row: the columns with the k largest keys, of equal ones the smaller columns, ascending."""
    row = tl.program_id(0)
    row_ptr = values_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    first_output = tl.cast(row, tl.int64) * k
    column = tl.arange(0, SIZE)
    exists = column < n_candidates
    if BLOCK:
        block = tl.load(blocks_ptr + first_output + column // BLOCK, mask=exists, other=0)
        column = block * BLOCK + column % BLOCK
        exists &= column < n_cols
    key = tl.load(row_ptr + column, mask=exists, other=0)
    if key.dtype.is_floating():
        key = _key(key, INCREASING)
    key = tl.where(exists, key, LOWEST)
    # The largest number that at least k keys reach, bit by bit: the k-th largest key.
    threshold = tl.where(tl.sum((key >= 0).to(tl.int32), axis=0) >= k, 0, LOWEST)
    step = tl.cast(1 << 30, tl.int32)
    for _ in tl.range(0, STEPS):
        higher = threshold + step
        threshold = tl.where(tl.sum((key >= higher).to(tl.int32), axis=0) >= k, higher, threshold)
        step = step >> 1
    greater = (key > threshold).to(tl.int32)
    equal = (key == threshold).to(tl.int32)
    left = k - tl.sum(greater, axis=0)  # of the equal ones, the first so many
    sums = tl.cumsum(greater + (equal << 16), axis=0)
    equal_so_far = sums >> 16
    place = (sums & 0xFFFF) + tl.minimum(equal_so_far, left) - 1
    chosen = (greater == 1) | ((equal == 1) & (equal_so_far <= left))
    tl.store(chosen_ptr + first_output + place, column, mask=chosen)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["n_inner"])
def order_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    chosen_ptr,  # (N, k) int32, ascending
    ids_ptr,  # (N, k) int64
    k,
    n_inner,
    stride_outer,
    stride_inner,
    INCREASING: tl.constexpr,
    SIZE: tl.constexpr,  # k, rounded up to a power of two
    STEP: tl.constexpr,  # columns that are compared with all others at a time
):
    """One program a row: the chosen columns, the largest key first. A place is the number of columns before it."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    chosen_ptr += tl.cast(row, tl.int64) * k
    index = tl.arange(0, SIZE)
    column = tl.load(chosen_ptr + index, mask=index < k, other=0)
    key = _key(tl.load(row_ptr + column), INCREASING)[:, None]
    before = tl.zeros([SIZE], tl.int32)
    for start in tl.range(0, k, STEP):
        other = start + tl.arange(0, STEP)
        other_column = tl.load(chosen_ptr + other, mask=other < k, other=0)
        other_key = tl.where(other < k, _key(tl.load(row_ptr + other_column), INCREASING), LOWEST)[None, :]
        first = (other_key > key) | ((other_key == key) & (other[None, :] < index[:, None]))
        before += tl.sum(first.to(tl.int32), axis=1)
    tl.store(ids_ptr + tl.cast(row, tl.int64) * k + before, column.to(tl.int64), mask=index < k)
