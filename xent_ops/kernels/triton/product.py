"""Matrix multiplications of ``count`` rows, a number on the device. Rows beyond it are neither computed nor written.

Persistent programs, one for each processor. ``flatten`` turns tiles and steps into one loop, so that the loads of the
next tile begin before the last one is stored. Operands are loaded by descriptors (TMA), which read zeros outside. A
tile of the result is ROWS x COLUMNS. A step along the inner dimension is INNER long.
"""

import triton
import triton.language as tl

MOST_SHARES = tl.constexpr(16)


@triton.jit
def _multiply(
    a,
    b,
    row,
    column,
    first,
    last,
    A_IS_T: tl.constexpr,
    B_IS_T: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """A tile of a @ b, of the steps along the inner dimension from first to last; a or b may lie transposed."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(first, last):
        inner = step * INNER
        if A_IS_T:
            left = a.load([inner, row]).T
        else:
            left = a.load([row, inner])
        if B_IS_T:
            right = b.load([column, inner]).T
        else:
            right = b.load([inner, column])
        total = tl.dot(left, right, total)
    return total


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half. Shared memory has room for three steps and part of a tile."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _write(out, tile, row, column, ADD: tl.constexpr):
    if ADD:
        tile += out.load([row, column]).to(tl.float32)
    out.store([row, column], tile.to(out.dtype))


@triton.jit
def _write_halves(out, tile, row, column, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    left, right = _halves(tile, ROWS, COLUMNS)
    _write(out, left, row, column, ADD)
    _write(out, right, row, column + COLUMNS // 2, ADD)


@triton.jit
def logits_kernel(
    input,  # (M, H); a descriptor, as all that are not pointers
    linear_weight,  # (V, H)
    logits,  # (M, V), in halves or quarters of a tile
    bias_ptr,  # (V,)
    count_ptr,  # (): the number of rows, int32
    classes,
    features,
    BIAS: tl.constexpr,
    QUARTERS: tl.constexpr,  # for float32
    GROUP: tl.constexpr,  # rows of tiles that run together: they read the same part of linear_weight
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """logits = input @ linear_weight.T + bias."""
    down = tl.cdiv(tl.load(count_ptr), ROWS)
    across = tl.cdiv(classes, COLUMNS)
    HALF: tl.constexpr = COLUMNS // 2
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        row, column = _place(tile, down, across, GROUP, ROWS, COLUMNS)
        total = _multiply(
            input, linear_weight, row, column, 0, tl.cdiv(features, INNER), False, True, ROWS, COLUMNS, INNER
        )
        left, right = _halves(total, ROWS, COLUMNS)
        if BIAS:
            columns = column + tl.arange(0, HALF)
            left += tl.load(bias_ptr + columns, mask=columns < classes, other=0.0).to(tl.float32)[None, :]
            columns += HALF
            right += tl.load(bias_ptr + columns, mask=columns < classes, other=0.0).to(tl.float32)[None, :]
        if QUARTERS:
            _write_halves(logits, left, row, column, False, ROWS, HALF)
            _write_halves(logits, right, row, column + HALF, False, ROWS, HALF)
        else:
            _write(logits, left, row, column, False)
            _write(logits, right, row, column + HALF, False)


@triton.jit
def grad_weight_kernel(
    gradient,  # (M, V), zero in rows that are not counted
    input,  # (M, H)
    grad_weight,  # (V, H), in halves or quarters of a tile
    count_ptr,  # (): the number of rows, int32
    classes,
    features,
    ADD: tl.constexpr,  # to the values of grad_weight
    QUARTERS: tl.constexpr,  # for float32
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """grad_weight (+)= gradient.T @ input."""
    count = tl.load(count_ptr)
    if ADD and count <= 0:
        return
    steps = tl.cdiv(tl.maximum(count, 1), INNER)  # without a row, one step over zeros
    down = tl.cdiv(classes, ROWS)
    across = tl.cdiv(features, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        row, column = _place(tile, down, across, GROUP, ROWS, COLUMNS)
        total = _multiply(gradient, input, row, column, 0, steps, True, False, ROWS, COLUMNS, INNER)
        if QUARTERS:
            left, right = _halves(total, ROWS, COLUMNS)
            _write_halves(grad_weight, left, row, column, ADD, ROWS, COLUMNS // 2)
            _write_halves(grad_weight, right, row, column + COLUMNS // 2, ADD, ROWS, COLUMNS // 2)
        else:
            _write_halves(grad_weight, total, row, column, ADD, ROWS, COLUMNS)


@triton.jit
def _place(tile, down, across, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First row and column of a tile, in an order in which neighbours find their operands in the L2 cache."""
    group = tile // (GROUP * across)
    within = tile - group * (GROUP * across)
    size = tl.minimum(down - group * GROUP, GROUP)
    return (group * GROUP + within % size) * ROWS, (within // size) * COLUMNS


@triton.jit
def _shares(count, classes, features, programs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    """Divides the tiles of grad_input, which are few and long, among programs.

    (tiles down, tiles across, tiles that programs take whole, shares of each other tile, steps of a share): as many
    tiles as fill all programs are taken whole. Programs share the others, each a part of the steps. The number of
    shares is the one that leaves the fewest programs idle in the last round.
    """
    down, across, steps = tl.cdiv(count, ROWS), tl.cdiv(features, COLUMNS), tl.cdiv(classes, INNER)
    whole = down * across // programs * programs
    left = down * across - whole
    shares = 1
    length = steps
    for candidate in tl.static_range(2, MOST_SHARES + 1):
        shorter = tl.cdiv(steps, candidate)
        better = tl.cdiv(left * candidate, programs) * shorter < tl.cdiv(left * shares, programs) * length
        better &= left * candidate <= 2 * programs  # parts has no more memory
        better &= shorter * (candidate - 1) < steps  # no share is empty
        shares = tl.where(better, candidate, shares)
        length = tl.where(better, shorter, length)
    return down, across, whole, shares, length


@triton.jit
def grad_input_kernel(
    gradient,  # (M, V)
    linear_weight,  # (V, H)
    packed,  # (M, H), in halves of a tile
    parts,  # (2 * programs * ROWS, COLUMNS) float32, in halves of a tile
    count_ptr,  # (): the number of rows, int32
    classes,
    features,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,  # computes shares of tiles, into parts; else whole tiles, into packed
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """gradient @ linear_weight, in tiles and shares of tiles. Programs that run at a time read the same classes."""
    programs = tl.num_programs(0)
    down, across, whole, shares, length = _shares(tl.load(count_ptr), classes, features, programs, ROWS, COLUMNS, INNER)
    steps = tl.cdiv(classes, INNER)
    left = down * across - whole
    for unit in tl.range(tl.program_id(0), left * shares if SPLIT else whole, programs, flatten=True):
        tile = unit
        first = 0
        last = steps
        if SPLIT:
            tile = whole + unit % left
            first = unit // left * length
            last = tl.minimum(first + length, steps)
        row, column = _place(tile, down, across, GROUP, ROWS, COLUMNS)
        total = _multiply(gradient, linear_weight, row, column, first, last, False, False, ROWS, COLUMNS, INNER)
        if SPLIT:
            _write_halves(parts, total, unit * ROWS, 0, False, ROWS, COLUMNS)
        else:
            _write_halves(packed, total, row, column, False, ROWS, COLUMNS)


@triton.jit
def scatter_kernel(
    packed_ptr,  # (M, H), contiguous, as parts_ptr written by grad_input_kernel
    parts_ptr,
    order_ptr,  # (M,) int64: the row of grad_input for each packed row
    grad_input_ptr,  # (N, H), contiguous
    count_ptr,
    classes,
    features,
    programs,  # number of programs of grad_input_kernel
    GROUP: tl.constexpr,
    SLICE: tl.constexpr,  # rows of a tile that one program takes
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Adds up the shares of a tile, in their order, and writes the rows to grad_input."""
    count = tl.load(count_ptr)
    down, across, whole, shares, _length = _shares(count, classes, features, programs, ROWS, COLUMNS, INNER)
    tile = tl.program_id(0)
    if tile >= down * across:
        return
    row, column = _place(tile, down, across, GROUP, ROWS, COLUMNS)
    rows = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    columns = tl.arange(0, COLUMNS)
    offsets = rows[:, None] * COLUMNS + columns[None, :]
    rows += row
    columns += column
    inside = (rows < count)[:, None] & (columns < features)[None, :]
    if tile < whole:
        total = tl.load(packed_ptr + rows.to(tl.int64)[:, None] * features + columns[None, :], inside).to(tl.float32)
    else:
        total = tl.zeros((SLICE, COLUMNS), tl.float32)
        left = down * across - whole
        for share in tl.range(0, shares):
            part = (tile - whole + share * left).to(tl.int64) * (ROWS * COLUMNS)
            total += tl.load(parts_ptr + part + offsets)
    to = tl.load(order_ptr + rows, mask=rows < count, other=0)
    grad = total.to(grad_input_ptr.dtype.element_ty)
    tl.store(grad_input_ptr + to[:, None] * features + columns[None, :], grad, inside)
