"""A vocabulary that is split over ranks: one shard's part of every row, and the join of all shards' parts.

kernels/reference_shard.py has the packed statistics and the formulas.
"""

import triton
import triton.language as tl

from .. import reference_shard
from .forward import scan
from .numerics import LN2, LOG2E, activation_of, row_offset, split_lse, without_infinity
from .row_outputs import shift_of, target_logit

HEADER, DIGIT = tl.constexpr(reference_shard.HEADER), tl.constexpr(reference_shard.DIGIT)


@triton.jit(
    do_not_specialize=["class_start", "n_classes"],
    do_not_specialize_on_alignment=["n_inner"],
)
def shard_kernel(
    logits_ptr,  # (outer, inner, n_cols) of this rank, rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype; classes of the whole vocabulary
    weight_ptr,  # (n_cols,) in the accumulator's dtype
    out_ptr,  # (numbers * N + HEADER,)
    n_cols,  # columns of this rank that are classes, may be 0
    class_start: "i64",
    n_classes: "i64",
    n_inner,
    stride_outer,
    stride_inner,
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    EDGES: tl.constexpr,  # as in numerics.aligned_body
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,  # elements in 16 bytes
):
    """One program a row, N programs; the first also writes the header."""
    ACC: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0)
    n_rows = tl.cast(tl.num_programs(0), tl.int64)
    offset = row_offset(row, n_inner, stride_outer, stride_inner)
    row_ptr = logits_ptr + offset
    label_smoothing = tl.cast(label_smoothing, ACC)
    act = activation_of(softcap, logit_scale, ACC)
    class_start = tl.cast(class_start, tl.int64)

    target = tl.load(target_ptr + row).to(tl.int64) - class_start
    owned = (target >= 0) & (target < n_cols)
    column = tl.where(owned, target, 0)
    shift = tl.cast(0.0, ACC)
    if FLAGS.smoothing:
        # Subtracting any logit of the row keeps the smoothing sum small if all are large. Without the target: the
        # first.
        first = target_logit(row_ptr, column, column < n_cols, act, FLAGS)
        shift = shift_of(first, FLAGS)
    maximum, total, _moment, smooth, weights, _top, _first = scan(
        logits_ptr, offset, 0, n_cols, n_cols, weight_ptr, act, shift,
        FLAGS, EDGES, BLOCK, VECTOR, ACC, "",
    )  # fmt: skip
    pivot = without_infinity(maximum)
    part = pivot - target_logit(row_ptr, column, owned, act, FLAGS)
    if FLAGS.weight:
        weight = tl.load(weight_ptr + column, mask=owned, other=0.0)
        part *= weight
        tl.store(out_ptr + 3 * n_rows + row, weight)
    part = tl.where(owned, part, 0.0)
    if FLAGS.smoothing:
        sum_weights = weights if FLAGS.weight else tl.cast(n_cols, ACC)
        part = (1.0 - label_smoothing) * part
        part += label_smoothing / tl.cast(n_classes, ACC) * (sum_weights * (pivot - shift) - smooth)
    tl.store(out_ptr + row, maximum)
    tl.store(out_ptr + n_rows + row, total)
    tl.store(out_ptr + 2 * n_rows + row, part)
    if row == 0:
        header = out_ptr + (4 if FLAGS.weight else 3) * n_rows
        size = tl.cast(n_cols, tl.int64)
        tl.store(header, (class_start // DIGIT).to(ACC))
        tl.store(header + 1, (class_start % DIGIT).to(ACC))
        tl.store(header + 2, (size // DIGIT).to(ACC))
        tl.store(header + 3, (size % DIGIT).to(ACC))
        if FLAGS.weight and FLAGS.smoothing:
            tl.store(header + 4, weights)
        else:
            tl.store(header + 4, size.to(ACC))


@triton.jit
def _integer(pointer, mask):
    """An integer of a header, from its two digits."""
    high = tl.load(pointer, mask=mask, other=0.0).to(tl.int64)
    return high * DIGIT + tl.load(pointer + 1, mask=mask, other=0.0).to(tl.int64)


@triton.jit(do_not_specialize=["n_rows", "n_classes", "ignore_index"])
def join_shards_kernel(
    gathered_ptr,  # (world, numbers * N + HEADER), contiguous: the output of shard_kernel of every rank
    target_ptr,  # (N,)
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    target_weight_ptr,  # (N,)
    lse_coefficient_ptr,  # (N,)
    lse_low_ptr,  # (N,): what the lse's rounding took
    n_rows: "i64",
    world,
    n_classes: "i64",
    ignore_index: "i64",
    label_smoothing: "fp64",
    FLAGS: tl.constexpr,
    RANKS: tl.constexpr,  # world, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """BLOCK rows a program. Ranks are visited in order, so that all ranks get the same bits."""
    ACC: tl.constexpr = loss_ptr.dtype.element_ty
    label_smoothing = tl.cast(label_smoothing, ACC)
    n_rows = tl.cast(n_rows, tl.int64)
    n_classes = tl.cast(n_classes, tl.int64)
    rows = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n_rows
    header = (4 if FLAGS.weight else 3) * n_rows
    stride = header + HEADER
    target = tl.load(target_ptr + rows, mask=inside, other=0).to(tl.int64)

    top = tl.full([BLOCK], float("-inf"), ACC)
    for rank in tl.range(0, world):
        maximum = tl.load(gathered_ptr + tl.cast(rank, tl.int64) * stride + rows, mask=inside, other=0.0)
        top = tl.maximum(top, maximum)
    pivot = without_infinity(top)

    ranks = tl.arange(0, RANKS)
    headers = gathered_ptr + ranks.to(tl.int64) * stride + header
    starts = _integer(headers, ranks < world)
    sizes = _integer(headers + 2, ranks < world)
    filled = sizes > 0
    # The shards tile the vocabulary if they start at different classes, each at 0 or where another one ends, and have
    # n_classes columns together.
    faults = tl.where(tl.sum(sizes, axis=0) == n_classes, 0, 1)
    total = tl.zeros([BLOCK], ACC)
    loss = tl.zeros([BLOCK], ACC)
    lse_coefficient = tl.zeros([BLOCK], ACC)
    target_weight = tl.zeros([BLOCK], ACC)
    for rank in tl.range(0, world):
        part_ptr = gathered_ptr + tl.cast(rank, tl.int64) * stride
        start = _integer(part_ptr + header, True)
        size = _integer(part_ptr + header + 2, True)
        same = tl.sum((filled & (starts == start)).to(tl.int32), axis=0)
        before = tl.sum((filled & (starts + sizes == start)).to(tl.int32), axis=0)
        follows = (same == 1) & ((start == 0) | (before > 0))
        faults += tl.where((size == 0) | follows, 0, 1)

        maximum = tl.load(part_ptr + rows, mask=inside, other=0.0)
        total += tl.load(part_ptr + n_rows + rows, mask=inside, other=0.0) * tl.exp2((maximum - pivot) * LOG2E)
        owned = (target >= start) & (target < start + size)
        weight = tl.where(owned, 1.0, 0.0).to(ACC)
        if FLAGS.weight:
            weight = tl.load(part_ptr + 3 * n_rows + rows, mask=inside, other=0.0)
        share = weight
        if FLAGS.smoothing:
            share = (1.0 - label_smoothing) * weight
            share += label_smoothing / tl.cast(n_classes, ACC) * tl.load(part_ptr + header + 4)
        loss += tl.load(part_ptr + 2 * n_rows + rows, mask=inside, other=0.0)
        # A shard without a share adds 0, even if the difference to its maximum overflows.
        loss += tl.where(share == 0.0, 0.0, share * (pivot - without_infinity(maximum)))
        lse_coefficient += share
        target_weight += weight

    log_total = tl.log2(total) * LN2
    loss += lse_coefficient * log_total
    if not (FLAGS.weight or FLAGS.smoothing):  # as in row_outputs.finish, for parts that are relative to 0
        loss = tl.maximum(loss, 0.0, propagate_nan=tl.PropagateNan.ALL)
    valid = (target >= 0) & (target < n_classes)
    loss = tl.where(valid & (faults == 0), loss, float("nan"))
    ignored = target == ignore_index
    loss = tl.where(ignored, 0.0, loss)
    lse, lse_low = split_lse(pivot, log_total)
    tl.store(lse_ptr + rows, tl.where(faults == 0, lse, float("nan")), mask=inside)
    tl.store(lse_low_ptr + rows, lse_low, mask=inside)
    tl.store(loss_ptr + rows, loss, mask=inside)
    tl.store(target_weight_ptr + rows, tl.where(ignored, 0.0, target_weight), mask=inside)
    tl.store(lse_coefficient_ptr + rows, tl.where(ignored, 0.0, lse_coefficient), mask=inside)
