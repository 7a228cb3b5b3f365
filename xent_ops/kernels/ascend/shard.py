"""A vocabulary that is split over ranks: one shard's part of every row, and the join of all shards' parts.

kernels/reference_shard.py has the packed statistics and the formulas.
"""

import triton
import triton.language as tl

from .. import reference_shard
from ..triton.numerics import row_offset, split_lse, without_infinity
from .forward import activate, scan, shift_of

DIGIT = tl.constexpr(reference_shard.DIGIT)
HEADER = tl.constexpr(reference_shard.HEADER)


@triton.jit(
    do_not_specialize=[
        "n_rows", "chunk", "n_cols", "n_inner", "class_start", "n_classes", "label_smoothing", "softcap", "logit_scale",
    ]
)  # fmt: skip
def shard_kernel(
    logits_ptr,  # (outer, inner, n_cols) of this rank, rows of any stride
    target_ptr,  # (N,), contiguous, int64 or int32; classes of the whole vocabulary
    weight_ptr,  # (n_cols,) float32
    out_ptr,  # (numbers * N + HEADER,) float32
    n_rows,
    chunk,  # rows of a program
    n_cols,  # columns of this rank that are classes, may be 0
    n_inner,
    stride_outer,
    stride_inner,
    class_start,
    n_classes,  # of the whole vocabulary
    label_smoothing,
    softcap,
    logit_scale,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,  # logit_scale is not 1
    SOFTCAP: tl.constexpr,  # see softcap of triton/configs.py
    BLOCK: tl.constexpr,
):
    """A program handles a chunk of rows. The program of row 0 also writes the header."""
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    columns = tl.arange(0, BLOCK)
    size = tl.cast(n_cols, tl.int64)
    start = tl.cast(class_start, tl.int64)
    number = tl.cast(n_rows, tl.int64)
    header_ptr = out_ptr + (4 if HAS_WEIGHT else 3) * number
    for row in tl.range(begin, end):
        row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner)
        local = tl.load(target_ptr + row).to(tl.int64) - start
        owned = (local >= 0) & (local < size)
        column = tl.where(owned, local, 0)
        x_target = tl.cast(0.0, tl.float32)
        target_weight = tl.cast(0.0, tl.float32)
        if n_cols > 0:
            z_target = tl.load(row_ptr + column).to(tl.float32)
            x_target = activate(z_target, logit_scale, softcap, HAS_SCALE, SOFTCAP)
            if HAS_WEIGHT:
                target_weight = tl.load(weight_ptr + column)
        shift = shift_of(x_target)
        maximum, total, _moment, smooth, weights, _top, _start = scan(
            row_ptr, weight_ptr, columns, n_cols, shift, logit_scale, softcap, HAS_WEIGHT, HAS_SMOOTHING, HAS_SCALE,
            SOFTCAP, False, False, BLOCK,
        )  # fmt: skip
        pivot = without_infinity(maximum)
        part = pivot - x_target
        if HAS_WEIGHT:
            target_weight = tl.where(owned, target_weight, 0.0)
            part *= target_weight
            tl.store(out_ptr + 3 * number + row, target_weight)
        if not (HAS_WEIGHT and HAS_SMOOTHING):
            weights = size.to(tl.float32)
        part = tl.where(owned, part, 0.0)
        if HAS_SMOOTHING:
            part = (1.0 - label_smoothing) * part + label_smoothing / n_classes * (weights * (pivot - shift) - smooth)
        tl.store(out_ptr + row, maximum)
        tl.store(out_ptr + number + row, total)
        tl.store(out_ptr + 2 * number + row, part)
        if row == 0:
            tl.store(header_ptr, (start // DIGIT).to(tl.float32))
            tl.store(header_ptr + 1, (start % DIGIT).to(tl.float32))
            tl.store(header_ptr + 2, (size // DIGIT).to(tl.float32))
            tl.store(header_ptr + 3, (size % DIGIT).to(tl.float32))
            tl.store(header_ptr + 4, weights)


@triton.jit
def _integer(pointer):
    """An integer of a header, from its two digits."""
    return tl.load(pointer).to(tl.int64) * DIGIT + tl.load(pointer + 1).to(tl.int64)


@triton.jit
def _faults(headers_ptr, stride, world, n_classes):
    """0 if the shards tile the vocabulary: each starts alone, at 0 or where another one ends; their sizes add up."""
    columns = tl.cast(0, tl.int64)
    faults = tl.cast(0, tl.int32)
    for rank in tl.range(0, world):
        header_ptr = headers_ptr + rank * stride
        start = _integer(header_ptr)
        size = _integer(header_ptr + 2)
        same = tl.cast(0, tl.int32)
        before = tl.cast(0, tl.int32)
        for other in tl.range(0, world):
            other_ptr = headers_ptr + other * stride
            other_start = _integer(other_ptr)
            other_size = _integer(other_ptr + 2)
            same += tl.where((other_size > 0) & (other_start == start), 1, 0)
            before += tl.where((other_size > 0) & (other_start + other_size == start), 1, 0)
        follows = (same == 1) & ((start == 0) | (before > 0))
        faults += tl.where((size == 0) | follows, 0, 1)
        columns += size
    return faults + tl.where(columns == n_classes, 0, 1)


@triton.jit(do_not_specialize=["n_rows", "chunk", "world", "n_classes", "ignore_index", "label_smoothing"])
def join_shards_kernel(
    gathered_ptr,  # (world, numbers * N + HEADER) float32, contiguous: the output of shard_kernel of every rank
    target_ptr,  # (N,), contiguous, int64 or int32
    loss_ptr,  # (N,) float32
    lse_ptr,  # (N,) float32
    target_weight_ptr,  # (N,) float32
    lse_coefficient_ptr,  # (N,) float32
    lse_low_ptr,  # (N,) float32: what the rounding of the lse took
    n_rows,
    chunk,  # rows of a program
    world,
    n_classes,  # of the whole vocabulary
    ignore_index,
    label_smoothing,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
):
    """A program handles a chunk of rows, all in scalars: in a vector of rows, targets would be compared as integers.

    Ranks are read in order, so that all ranks get the same bits.
    """
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, n_rows)
    number = tl.cast(n_rows, tl.int64)
    stride = (4 if HAS_WEIGHT else 3) * number + HEADER
    headers_ptr = gathered_ptr + (stride - HEADER)
    tiled = _faults(headers_ptr, stride, world, n_classes) == 0
    for row in tl.range(begin, end):
        target = tl.load(target_ptr + row).to(tl.int64)
        top = tl.cast(float("-inf"), tl.float32)
        for rank in tl.range(0, world):
            top = tl.maximum(top, tl.load(gathered_ptr + rank * stride + row))
        pivot = without_infinity(top)
        total = tl.cast(0.0, tl.float32)
        loss = tl.cast(0.0, tl.float32)
        target_weight = tl.cast(0.0, tl.float32)
        lse_coefficient = tl.cast(0.0, tl.float32)
        for rank in tl.range(0, world):
            part_ptr = gathered_ptr + rank * stride + row
            maximum = tl.load(part_ptr)
            total += tl.load(part_ptr + number) * tl.exp(maximum - pivot)
            header_ptr = headers_ptr + rank * stride
            if HAS_WEIGHT:
                weight = tl.load(part_ptr + 3 * number)
            else:
                local = target - _integer(header_ptr)
                weight = tl.where((local >= 0) & (local < _integer(header_ptr + 2)), 1.0, 0.0)
            share = weight
            if HAS_SMOOTHING:
                share = (1.0 - label_smoothing) * weight + label_smoothing / n_classes * tl.load(header_ptr + 4)
            # A shard without a share adds 0, even if the difference to its maximum overflows.
            moved = tl.where(share == 0.0, 0.0, share * (pivot - without_infinity(maximum)))
            loss += tl.load(part_ptr + 2 * number) + moved
            lse_coefficient += share
            target_weight += weight
        log_total = tl.log(total)
        loss += lse_coefficient * log_total
        loss = tl.where(tiled & (target >= 0) & (target < n_classes), loss, float("nan"))
        counted = target != ignore_index
        tl.store(loss_ptr + row, tl.where(counted, loss, 0.0))
        lse, lse_low = split_lse(pivot, log_total)
        tl.store(lse_ptr + row, tl.where(tiled, lse, float("nan")))
        tl.store(lse_low_ptr + row, lse_low)
        tl.store(target_weight_ptr + row, tl.where(counted, target_weight, 0.0))
        tl.store(lse_coefficient_ptr + row, tl.where(counted, lse_coefficient, 0.0))
