"""One pass over a row of logits: loss, lse and, if they are asked for, argmax and entropy.

One program for each row. short.py serves rows of up to a few thousand columns. split_row.py serves fewer rows than the
GPU can hold programs.
"""

import triton
import triton.language as tl

from .numerics import (
    LN2,
    LOG2E,
    activate,
    activation_of,
    aligned_body,
    bounded,
    edge_columns,
    row_offset,
    scale_of,
    tanh_residual,
    weights_from,
    without_infinity,
)
from .row_outputs import finish, shift_of, target_logit

NO_COLUMN = tl.constexpr(2147483647)  # more than any column


@triton.jit
def _start(LANES: tl.constexpr, VECTOR: tl.constexpr, FLAGS: tl.constexpr, ACC: tl.constexpr):
    """The running state of LANES independent online softmaxes, each over vectors of VECTOR elements."""
    maximum = tl.full([LANES], 0.0 if FLAGS.softcap == 2 else float("-inf"), ACC)
    zero = tl.zeros([LANES], ACC)
    best = tl.full([LANES, VECTOR], float("-inf"), ACC)
    best_column = tl.full([LANES, VECTOR], NO_COLUMN, tl.int32)
    #       maximum, sum of e^(x - maximum), sum of e^(x - maximum) (x - maximum), smoothing sum, sum of weights, argmax
    return maximum, zero, zero, zero, zero, best, best_column


@triton.jit
def _fold(x, VECTOR: tl.constexpr):
    """The sum of each vector. Not tl.sum over axis 1: Triton's thread-locality pass fails on it in this loop (3.6,
    3.7).

    An accumulator for each element takes 24 registers more, so fewer programs fit on a processor (8192 x 32000 with all
    options on: 0.86 copies, and 0.79 with this function).
    """
    for step in tl.static_range(3):
        if VECTOR >> step > 1:
            a, b = tl.split(tl.reshape(x, [x.shape[0], VECTOR >> (step + 1), 2]))
            x = a + b
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def _visit(
    state,  # see _start
    pointers,  # (LANES, VECTOR) into the logits of the row
    columns,  # (LANES, VECTOR)
    inside,  # (LANES, VECTOR): columns that exist; read only if MASKED
    weight_pointers,  # (LANES, VECTOR)
    act,
    shift,  # the smoothing sum subtracts it: x of the target if finite
    MASKED: tl.constexpr,
    FLAGS: tl.constexpr,
    VECTOR: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Fold one tile of the row into the running state."""
    maximum, total, moment, smooth, weights, best, best_column = state
    if MASKED:
        z = tl.load(pointers, mask=inside, other=0.0, eviction_policy=EVICTION)
    else:
        z = tl.load(pointers, eviction_policy=EVICTION)
    z = z.to(total.dtype)
    if FLAGS.softcap == 2:
        x = bounded(tanh_residual(z, act, True), act, 0.0)
    else:
        x = activate(z, act, FLAGS)
    if FLAGS.smoothing:
        relative = x - shift
        if FLAGS.weight:
            if MASKED:
                w = tl.load(weight_pointers, mask=inside, other=0.0)
            else:
                w = tl.load(weight_pointers)
            relative *= w
            weights += _fold(w, VECTOR)
        if MASKED:
            relative = tl.where(inside, relative, 0.0)
        smooth += _fold(relative, VECTOR)
    if MASKED:
        x = tl.where(inside, x, float("-inf"))  # after softcap, which would turn -inf into -softcap
    if FLAGS.argmax:
        z *= scale_of(act)
        if MASKED:
            z = tl.where(inside, z, float("-inf"))
        better = z > best
        best = tl.where(better, z, best)
        best_column = tl.where(better, columns, best_column)
    if FLAGS.softcap == 2:  # x is in units of ln 2 until _join; sums are relative to 0, the maximum of _start
        new_maximum = maximum
        e = tl.exp2(x)
        if FLAGS.entropy:
            moment += tl.sum(tl.where(e == 0.0, 0.0, e * x), axis=1)
        total += tl.sum(e, axis=1)
    else:
        # One maximum for each vector, not for each tile: threads exchange nothing inside the loop. The price is one
        # more exponential for VECTOR elements.
        new_maximum = tl.maximum(maximum, tl.max(x, axis=1))
        pivot = without_infinity(new_maximum)
        moved = maximum - pivot
        decay = tl.exp2(moved * LOG2E)
        distance = x - pivot[:, None]
        e = tl.exp2(distance * LOG2E)
        if FLAGS.entropy:
            moment = decay * tl.where(total == 0.0, 0.0, moment + moved * total)
            moment += tl.sum(tl.where(e == 0.0, 0.0, e * distance), axis=1)
        total = total * decay + tl.sum(e, axis=1)
    return new_maximum, total, moment, smooth, weights, best, best_column


@triton.jit
def _join(
    state,
    pivot,
    FLAGS: tl.constexpr,
):
    """Sums over the lanes of a state, relative to pivot: total, moment, smoothing sum, sum of weights."""
    maximum, total, moment, smooth, weights, _best, _best_column = state
    if FLAGS.softcap == 2:
        moment *= LN2
        smooth *= LN2
    moved = maximum - pivot
    decay = tl.exp2(moved * LOG2E)
    zero = tl.cast(0.0, total.dtype)
    row_moment = zero
    if FLAGS.entropy:
        row_moment = tl.sum(tl.where(total == 0.0, 0.0, (moment + moved * total) * decay), axis=0)
    row_smooth = zero
    row_weights = zero
    if FLAGS.smoothing:
        row_smooth = tl.sum(smooth, axis=0)
        if FLAGS.weight:
            row_weights = tl.sum(weights, axis=0)
    return tl.sum(total * decay, axis=0), row_moment, row_smooth, row_weights


@triton.jit
def _first_of(state, top):
    """The smallest column that holds ``top``."""
    _maximum, _total, _moment, _smooth, _weights, best, best_column = state
    return tl.min(tl.min(tl.where(best == top, best_column, NO_COLUMN), axis=1), axis=0)


@triton.jit
def scan(
    logits_ptr,
    offset,  # offset of the first element from logits_ptr
    first_column,  # its column
    n_cols,  # number of columns to scan
    n_classes,  # columns of the row
    weight_ptr,
    act,
    shift,
    FLAGS: tl.constexpr,
    EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ACC: tl.constexpr,
    EVICTION: tl.constexpr,  # eviction policy of the logits; no default value: Triton 3.6 cannot pass it on
):
    """Scan n_cols elements of a row: maximum, total, moment, smooth, weights, largest z, its first column.

    total and moment are relative to the maximum (to 0 where that is -inf).
    """
    LANES: tl.constexpr = BLOCK // VECTOR
    head, boundary, body = aligned_body(offset, n_cols, EDGES, VECTOR)
    body_ptr = logits_ptr + boundary
    body_column = first_column + head
    body_weight_ptr = weights_from(weight_ptr, body_column, n_classes, EDGES)
    lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    state = _start(LANES, VECTOR, FLAGS, ACC)
    n_full = body // BLOCK * BLOCK
    for start in tl.range(0, n_full, BLOCK):
        columns = start + lane
        state = _visit(
            state, body_ptr + columns, body_column + columns, columns < body, body_weight_ptr + columns, act,
            shift, False, FLAGS, VECTOR, EVICTION,
        )  # fmt: skip
    if n_full < body:
        columns = n_full + lane
        state = _visit(
            state, body_ptr + columns, body_column + columns, columns < body, body_weight_ptr + columns, act,
            shift, True, FLAGS, VECTOR, EVICTION,
        )  # fmt: skip
    maximum = tl.max(state[0], axis=0)
    if EDGES:
        columns, inside = edge_columns(head, body, n_cols, EDGES)
        columns = tl.reshape(columns, [2 * EDGES // VECTOR, VECTOR])
        inside = tl.reshape(inside, [2 * EDGES // VECTOR, VECTOR])
        edges = _visit(
            _start(2 * EDGES // VECTOR, VECTOR, FLAGS, ACC), logits_ptr + offset + columns, first_column + columns,
            inside, weight_ptr + first_column + columns, act, shift, True, FLAGS, VECTOR, EVICTION,
        )  # fmt: skip
        maximum = tl.maximum(maximum, tl.max(edges[0], axis=0))
    pivot = without_infinity(maximum)
    total, moment, smooth, weights = _join(state, pivot, FLAGS)
    top = tl.cast(float("-inf"), ACC)
    first = tl.cast(0, tl.int32)
    if FLAGS.argmax:
        top = tl.max(tl.max(state[5], axis=1), axis=0)
        first = _first_of(state, top)
    if EDGES:
        edge_total, edge_moment, edge_smooth, edge_weights = _join(edges, pivot, FLAGS)
        total += edge_total
        moment += edge_moment
        smooth += edge_smooth
        weights += edge_weights
        if FLAGS.argmax:
            edge_top = tl.max(tl.max(edges[5], axis=1), axis=0)
            both = tl.maximum(top, edge_top)
            first = tl.minimum(
                tl.where(top == both, first, NO_COLUMN), tl.where(edge_top == both, _first_of(edges, both), NO_COLUMN)
            )
            top = both
    return maximum, total, moment, smooth, weights, top, first


@triton.jit(
    do_not_specialize=["ignore_index"],
    do_not_specialize_on_alignment=["n_inner"],
)
def forward_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    weight_ptr,  # (V,) in the accumulator's dtype
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    argmax_ptr,  # (N,) int64
    entropy_ptr,  # (N,)
    lse_low_ptr,  # (N,): what the lse's rounding took
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    ignore_index: "i64",
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    EDGES: tl.constexpr,  # as in numerics.aligned_body
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,  # elements in 16 bytes
):
    """One program a row. The exponentials are summed relative to a running maximum (online softmax)."""
    ACC: tl.constexpr = loss_ptr.dtype.element_ty
    row = tl.program_id(0)
    offset = row_offset(row, n_inner, stride_outer, stride_inner)
    row_ptr = logits_ptr + offset
    label_smoothing = tl.cast(label_smoothing, ACC)
    act = activation_of(softcap, logit_scale, ACC)
    target = tl.load(target_ptr + row).to(tl.int64)
    valid = (target >= 0) & (target < n_cols)
    n_read = n_cols
    if FLAGS.skip_ignored:
        valid &= target != ignore_index
        n_read = tl.where(target == ignore_index, 0, n_cols)
    shift = tl.cast(0.0, ACC)
    if FLAGS.smoothing:
        shift = shift_of(target_logit(row_ptr, target, valid, act, FLAGS), FLAGS)
    maximum, total, moment, smooth, weights, _top, first = scan(
        logits_ptr, offset, 0, n_read, n_cols, weight_ptr, act, shift, FLAGS, EDGES, BLOCK, VECTOR,
        ACC, "",
    )  # fmt: skip
    # Loaded last: before the loop, the row's loads would wait for the target (with skip_ignored they wait for it
    # anyway). Finding it in the tile by comparing columns was slower (131072 x 1024: 0.84 copies instead of 0.66).
    x_target = target_logit(row_ptr, target, valid, act, FLAGS)
    finish(
        row, True, n_cols, target, valid, x_target, shift, maximum, total, moment, smooth, weights, first,
        weight_ptr, loss_ptr, lse_ptr, argmax_ptr, entropy_ptr, lse_low_ptr, ignore_index, label_smoothing, FLAGS,
    )  # fmt: skip
