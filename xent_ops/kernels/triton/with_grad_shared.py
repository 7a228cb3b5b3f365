"""Loss and gradient in one pass. The row stays in shared memory between its sums and its gradient.

If a row is too long for that, several programs share it and wait for each other's sums. Written in Gluon, the layer of
Triton that can address shared memory. It is for NVIDIA GPUs, and for the plain loss (with a z-loss or a positive
logit_scale). with_grad.py has every option and runs everywhere.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

NO_COLUMN = gl.constexpr(2147483647)  # more than any column
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # as of Triton 3.8
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name from Triton 3.7 on, and before


@gluon.jit
def _fold(pivot, total, z, k):
    """Fold a tile (lanes, vector) into each lane's pivot, its maximum, and its sum of 2^(k (z - pivot)).

    The subtraction comes first: k z - k pivot would lose 1e-3 if logits are near 1e4, and overflow near finfo.min.
    """
    new_pivot = gl.maximum(pivot, gl.max(z, axis=1))
    finite = gl.where(new_pivot == float("-inf"), 0.0, new_pivot)
    return new_pivot, total * gl.exp2((pivot - finite) * k) + gl.sum(gl.exp2((z - finite[:, None]) * k), axis=1)


@gluon.jit
def _join(pivots, totals, k):
    """(the largest pivot, or 0 where there is only -inf; the total relative to it)"""
    pivot = gl.max(pivots, axis=0)
    pivot = gl.where(pivot == float("-inf"), 0.0, pivot)
    return pivot, gl.sum(totals * gl.exp2((pivots - pivot) * k), axis=0)


@gluon.jit
def _exchange(words_ptr, part, pivot, total, PARTS: gl.constexpr, WARPS: gl.constexpr):
    """Publish a part's pivot and total, and wait for the words of all parts of its row.

    The two numbers are one word, so they are written and read together. The word is never 0: a total is 0 only if the
    pivot is -inf. Every program joins all words in the same order. A lane reads one word, because the reads of waiting
    programs slow down the others (4096 x 128256: 1.07 copies; 1.19 if each lane reads all words).
    """
    SLOTS: gl.constexpr = triton.next_power_of_2(PARTS)
    slot = gl.arange(0, SLOTS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    exists = slot < PARTS
    pivot = gl.where(total == 0.0, float("-inf"), pivot)
    word = (pivot.to(gl.int32, bitcast=True).to(gl.int64) << 32) | (
        total.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    )
    gl.atomic_xchg(words_ptr + part, word, sem="relaxed")
    words = gl.load(words_ptr + slot, mask=exists, other=1, volatile=True)
    while gl.min(gl.where(words == 0, 0, 1), axis=0) == 0:
        words = gl.load(words_ptr + slot, mask=exists, other=1, volatile=True)
    pivots = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    totals = words.to(gl.int32).to(gl.float32, bitcast=True)
    return gl.where(exists, pivots, float("-inf")), gl.where(exists, totals, 0.0)


@gluon.jit
def _moments(exponent, inside, MASKED: gl.constexpr):
    """For each lane the sum of 2^exponent * exponent. An exponent of -inf adds 0, and so does a column outside."""
    if MASKED:
        exponent = gl.where(inside, exponent, float("-inf"))
    return gl.sum(gl.exp2(exponent) * gl.maximum(exponent, -1e4), axis=1)


@gluon.jit
def _row_offset(row, n_inner, stride_outer, stride_inner):
    outer = row // n_inner
    return outer.to(gl.int64) * stride_outer + (row - outer * n_inner).to(gl.int64) * stride_inner


@gluon.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=["n_inner", "n_out_inner"])
def with_grad_shared_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    grad_scale_ptr,  # (N,) with a stride, 0 for a scalar
    grad_lse_square_ptr,  # (N,) with a stride, 0 for a scalar
    words_ptr,  # (1 + N * PARTS,) int64, all 0: a counter, and a word for each part. Not read where PARTS is 1.
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    tops_ptr,  # (N, PARTS), as the next two: read by join_statistics_kernel, not written without STATISTICS
    firsts_ptr,  # int32
    entropies_ptr,
    grad_ptr,  # (outer, inner, V): may be the logits themselves, or in fewer bytes the front of each of their rows
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
    logit_scale: "fp64",
    HAS_LSE_SQUARE: gl.constexpr,
    STATISTICS: gl.constexpr,  # argmax and entropy
    EDGES: gl.constexpr,  # as in numerics.aligned_body; where it is not 0, logits and gradient have equal strides
    PARTS: gl.constexpr,  # programs that share a row
    TILE: gl.constexpr,
    TILES: gl.constexpr,  # tiles of a part
    VECTOR: gl.constexpr,  # elements in 16 bytes
    WARPS: gl.constexpr,
):
    """One program for each row or part of a row. A thread reads only its own elements of shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32, 1], [WARPS, 1], [1, 0])
    lanes: gl.constexpr = gl.SliceLayout(1, layout)
    LANES: gl.constexpr = TILE // VECTOR
    SPAN: gl.constexpr = TILES * TILE
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    # With EDGES up to EDGES - 1 columns are in no tile, so that the last one may be empty.
    RAGGED: gl.constexpr = 0 if PARTS > 1 else TILES - 2 if EDGES else TILES - 1  # the first tile that may not be full

    row = gl.program_id(0)
    part = 0
    if PARTS > 1:
        # Parts are numbered in the order in which programs start, which need not be the order of program ids. So the
        # programs that this one waits for have started, or are the next to start: none waits for ever.
        ticket = gl.atomic_add(words_ptr, 1, sem="relaxed").to(gl.int32)
        row = ticket // PARTS
        part = ticket - row * PARTS
    offset = _row_offset(row, n_inner, stride_outer, stride_inner)
    out_offset = _row_offset(row, n_out_inner, out_stride_outer, out_stride_inner)
    head = 0
    if EDGES:
        head = gl.minimum(((EDGES - 1) - (offset + (EDGES - 1)) % EDGES).to(gl.int32), n_cols)
    # As in numerics.aligned_body. Copies to shared memory do not compile where the compiler cannot tell alignment.
    boundary = (offset + head) // VECTOR * VECTOR
    out_boundary = (out_offset + head) // VECTOR * VECTOR
    body = (n_cols - head) // VECTOR * VECTOR
    mine = body - part * SPAN  # columns of the body from this part's first on: the last part may have none
    columns = gl.arange(0, LANES, layout=lanes)[:, None] * VECTOR
    columns += gl.arange(0, VECTOR, layout=gl.SliceLayout(0, layout))[None, :]
    # A tile's addresses are one 64-bit base and 32-bit columns: a 64-bit address for each lane takes more registers.
    row_ptr = logits_ptr + boundary + part * SPAN
    out_row_ptr = grad_ptr + out_boundary + part * SPAN

    target = gl.load(target_ptr + row).to(gl.int64)
    ignored = target == ignore_index
    valid = (target >= 0) & (target < n_cols)
    # An ignored row is not read. Its sums are of old shared memory, and are not used below.
    read = gl.where(ignored, 0, mine)
    kept = gl.allocate_shared_memory(logits_ptr.dtype.element_ty, [TILES, LANES, VECTOR], flat)
    for i in gl.static_range(TILES):
        copy_to_shared(
            kept.index(i), row_ptr + (i * TILE + columns), mask=i * TILE + columns < read, eviction_policy="evict_first"
        )
        async_copy.commit_group()
    scale = gl.cast(logit_scale, gl.float32)
    k = scale * LOG2E
    # One part reads the target's logit and writes the loss and lse: other parts' columns may already be overwritten.
    position = target - head
    is_writer = gl.where(valid & (position >= 0) & (position < body), position // SPAN, 0) == part
    z_target = gl.load(logits_ptr + offset + target, mask=valid & is_writer, other=0.0).to(gl.float32)
    a = gl.load(grad_scale_ptr + row.to(gl.int64) * grad_scale_stride).to(gl.float32)

    pivot = gl.full([LANES], float("-inf"), gl.float32, layout=lanes)
    total = gl.full([LANES], 0.0, gl.float32, layout=lanes)
    top, top_tile = pivot, gl.full([LANES], 0, gl.int32, layout=lanes)  # largest logit of each lane, and its tile
    if EDGES:  # the first part reads the edges: one column in each of the first lanes
        edge = gl.arange(0, LANES, layout=lanes)
        edge_columns = gl.where(edge < head, edge, edge + body)
        is_edge = (edge < 2 * EDGES) & (edge_columns < n_cols) & (part == 0)
        z_edge = gl.load(logits_ptr + offset + edge_columns, mask=is_edge, other=0.0).to(gl.float32)
        z = gl.where(is_edge, z_edge, float("-inf"))
        pivot, total = _fold(pivot, total, z[:, None], k)
    for i in gl.static_range(TILES):
        async_copy.wait_group(TILES - 1 - i)
        z = kept.index(i).load(layout).to(gl.float32)
        if i >= RAGGED:
            z = gl.where(i * TILE + columns < mine, z, float("-inf"))
        pivot, total = _fold(pivot, total, z, k)
        if STATISTICS:
            tile_top = gl.max(z, axis=1)
            top_tile = gl.where(tile_top > top, i, top_tile)
            top = gl.maximum(top, tile_top)

    row_pivot, row_total = _join(pivot, total, k)
    if PARTS > 1:
        if logits_ptr.dtype.element_ty != grad_ptr.dtype.element_ty:
            # A narrower gradient is written to the front of the row, over other parts' logits. A part's word tells the
            # others that it has read its logits. The word also depends on the target's logit, without being changed
            # by it, so that this one has been read too.
            own = gl.where(valid & is_writer & (target != ignore_index), z_target, float("-inf"))
            row_pivot = gl.maximum(row_pivot, own)
        row_words_ptr = words_ptr + 1 + row.to(gl.int64) * PARTS
        pivots, totals = _exchange(row_words_ptr, part, row_pivot, row_total, PARTS, WARPS)
        row_pivot, row_total = _join(pivots, totals, k)
    log2_sum = gl.log2(row_total)
    # Relative to the pivot until the end: lse - x_target would lose digits if both are large.
    loss = (log2_sum - (z_target - row_pivot) * k) * LN2
    loss = gl.where(valid, loss, float("nan"))
    lse = gl.where(ignored, float("inf"), row_pivot * scale + log2_sum * LN2)
    gl.store(loss_ptr + row, gl.where(ignored, 0.0, loss), mask=is_writer)
    gl.store(lse_ptr + row, lse, mask=is_writer)

    a = gl.where(ignored, 0.0, gl.where(valid, a, float("nan")))
    upstream = a
    if HAS_LSE_SQUARE:
        square = gl.load(grad_lse_square_ptr + row.to(gl.int64) * grad_lse_square_stride).to(gl.float32)
        upstream += gl.where(ignored, 0.0, 2.0 * square * lse)
    # The softmax is relative to the pivot too: with the rounded lse its error would be 2^-24 |lse|.
    factor = upstream * scale / row_total
    dtype: gl.constexpr = grad_ptr.dtype.element_ty
    moment = gl.full([LANES], 0.0, gl.float32, layout=lanes)
    if (upstream != 0.0) | (a != 0.0):
        for j in gl.static_range(TILES - 1, -1, -1):
            z = kept.index(j).load(layout).to(gl.float32)
            exponent = (z - row_pivot) * k
            e = gl.exp2(exponent)
            inside = j * TILE + columns < mine
            if STATISTICS:
                moment += _moments(exponent, inside, j >= RAGGED)
            gl.store(
                out_row_ptr + (j * TILE + columns), (factor * e).to(dtype), mask=inside, eviction_policy="evict_first"
            )
        if EDGES:
            grad = factor * gl.exp2((z_edge - row_pivot) * k)
            gl.store(grad_ptr + out_offset + edge_columns, grad.to(dtype), mask=is_edge)
        barrier()  # the target's own element is written again, as in backward.py
        grad = factor * gl.exp2((z_target - row_pivot) * k) - a * scale
        gl.store(grad_ptr + out_offset + target, grad.to(dtype), mask=valid & is_writer)
    else:  # exact zeros, whatever the logits hold
        zero = gl.full([LANES, VECTOR], 0.0, dtype, layout=layout)
        for j in gl.static_range(TILES):
            inside = j * TILE + columns < mine
            if STATISTICS:
                z = kept.index(j).load(layout).to(gl.float32)
                moment += _moments((z - row_pivot) * k, inside, True)
            gl.store(out_row_ptr + (j * TILE + columns), zero, mask=inside)
        if EDGES:
            gl.store(grad_ptr + out_offset + edge_columns, gl.full([LANES], 0.0, dtype, layout=lanes), mask=is_edge)
    if STATISTICS:
        # The first of equal logits is in the first tile in which a lane has found one.
        part_top = gl.max(top, axis=0)
        tile = gl.minimum(gl.min(gl.where(top == part_top, top_tile, TILES), axis=0), TILES - 1)
        z = kept.index(tile).load(layout).to(gl.float32)
        is_top = (z == part_top) & (tile * TILE + columns < mine)
        found = gl.where(is_top, head + part * SPAN + tile * TILE + columns, NO_COLUMN)
        first = gl.min(gl.min(found, axis=1), axis=0)
        if EDGES:
            edge_top = gl.max(gl.where(is_edge, z_edge, float("-inf")), axis=0)
            first_edge = gl.min(gl.where(is_edge & (z_edge == edge_top), edge_columns, NO_COLUMN), axis=0)
            first = gl.where(
                edge_top > part_top, first_edge, gl.where(edge_top == part_top, gl.minimum(first, first_edge), first)
            )
            part_top = gl.maximum(part_top, edge_top)
            moment += _moments(((z_edge - row_pivot) * k)[:, None], is_edge[:, None], True)
        # The parts of an entropy add up: ln 2 (log2 of the total, less the moments over the total).
        share = -gl.sum(moment, axis=0) / row_total
        if PARTS == 1:
            share += log2_sum
        else:
            share = gl.where(part == 0, log2_sum + share, share)
        slot_index = row.to(gl.int64) * PARTS + part
        gl.store(tops_ptr + slot_index, part_top)
        gl.store(firsts_ptr + slot_index, gl.where(ignored, -1, first))
        gl.store(entropies_ptr + slot_index, gl.where(ignored, 0.0, share * LN2))


@triton.jit
def join_statistics_kernel(
    tops_ptr,  # (N, PARTS): the largest of a part
    firsts_ptr,  # (N, PARTS): its first column
    entropies_ptr,  # (N, PARTS): the part's share of the entropy
    argmax_ptr,  # (N,) int64
    entropy_ptr,  # (N,)
    n_cols,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,  # PARTS or more
    ARGMAX: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    exists = slot < PARTS
    slot_index = tl.cast(row, tl.int64) * PARTS + slot
    if ARGMAX:
        tops = tl.load(tops_ptr + slot_index, mask=exists, other=float("-inf"))
        firsts = tl.load(firsts_ptr + slot_index, mask=exists, other=0)
        best = exists & (tops == tl.max(tops, axis=0))
        first = tl.min(tl.where(best, firsts, 2147483647), axis=0)
        tl.store(argmax_ptr + row, tl.where(first < n_cols, first, 0).to(tl.int64))
    if ENTROPY:
        tl.store(entropy_ptr + row, tl.sum(tl.load(entropies_ptr + slot_index, mask=exists, other=0.0), axis=0))
