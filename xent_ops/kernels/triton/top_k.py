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


@triton.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=["n_inner"])
def block_keys_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    own_ptr,  # (N,): the target's logit, if OWN
    keys_ptr,  # (N, number of blocks), int32
    rank_ptr,  # (N,), int64
    n_cols,
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
    keys_ptr += tl.cast(row, tl.int64) * tl.cdiv(n_cols, BLOCK)
    target = tl.cast(0, tl.int64)
    own = tl.cast(0, tl.int32)
    if WITH_RANK:
        target = tl.load(target_ptr + row).to(tl.int64)
        valid = OWN | ((target != ignore_index) & (target >= 0) & (target < n_cols))
        if OWN:
            own = _key(tl.load(own_ptr + row), INCREASING)
        else:
            own = _key(tl.load(row_ptr + target, mask=valid, other=0.0), INCREASING)
    before = tl.zeros([WIDTH // BLOCK, BLOCK], tl.int32)  # columns that are before the target
    n_full = n_cols // WIDTH * WIDTH
    for masked in tl.static_range(2):  # full tiles, and the last one
        for start in tl.range(n_full if masked else 0, n_cols if masked else n_full, WIDTH):
            block = start // BLOCK + tl.arange(0, WIDTH // BLOCK)
            columns = start + tl.arange(0, WIDTH // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            if masked:
                inside = columns < n_cols
                key = tl.where(inside, _key(tl.load(row_ptr + columns, mask=inside, other=0.0), INCREASING), LOWEST)
            else:
                key = _key(tl.load(row_ptr + columns), INCREASING)
            tl.store(keys_ptr + block, tl.max(key, axis=1), mask=block * BLOCK < n_cols)
            if WITH_RANK:
                before += ((key > own) | ((key == own) & (columns < target))).to(tl.int32)
    if WITH_RANK:
        tl.store(rank_ptr + row, tl.where(valid, tl.sum(tl.sum(before, axis=1), axis=0), -1).to(tl.int64))


@triton.jit
def _store_largest(key, column, k, chosen_ptr, STEPS: tl.constexpr):
    """Store the columns of the k largest keys, of equal ones the smaller columns, ascending."""
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
    tl.debug_barrier()  # all threads have read what this overwrites
    tl.store(chosen_ptr + place, column, mask=chosen)
    tl.debug_barrier()  # all threads may read it


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["n_inner"])
def choose_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    keys_ptr,  # (N, number of blocks) int32
    ids_ptr,  # (N, k) int64
    n_cols,
    k,
    n_inner,
    stride_outer,
    stride_inner,
    INCREASING: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # the number of blocks, rounded up to a power of two; up to 2^14
    SIZE: tl.constexpr,  # k * BLOCK, rounded up to a power of two; up to 2^14
    WIDTH: tl.constexpr,  # k, rounded up to a power of two
    STEPS: tl.constexpr,  # the highest bits of a key without the sign; the others are 0
):
    """One program a row: its k blocks with the largest keys, the k largest columns of these, and their order."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
    ids_ptr += tl.cast(row, tl.int64) * k
    chosen_ptr = tl.cast(ids_ptr, tl.pointer_type(tl.int32))  # in the same memory: blocks, then columns
    n_blocks = tl.cdiv(n_cols, BLOCK)
    block = tl.arange(0, BLOCKS)
    key = tl.load(keys_ptr + tl.cast(row, tl.int64) * n_blocks + block, mask=block < n_blocks, other=LOWEST)
    _store_largest(key, block, k, chosen_ptr, STEPS)
    candidate = tl.arange(0, SIZE)
    block = tl.load(chosen_ptr + candidate // BLOCK, mask=candidate < k * BLOCK, other=n_blocks)
    column = block * BLOCK + candidate % BLOCK
    exists = column < n_cols
    key = tl.where(exists, _key(tl.load(row_ptr + column, mask=exists, other=0.0), INCREASING), LOWEST)
    _store_largest(key, column, k, chosen_ptr, STEPS)
    index = tl.arange(0, WIDTH)
    column = tl.load(chosen_ptr + index, mask=index < k, other=0)
    key = tl.where(index < k, _key(tl.load(row_ptr + column), INCREASING), LOWEST)
    pair = tl.sort((key.to(tl.int64) << 32) - column, descending=True)  # the largest key, of equal ones the first
    tl.debug_barrier()
    tl.store(ids_ptr + index, -pair & 0xFFFFFFFF, mask=index < k)
