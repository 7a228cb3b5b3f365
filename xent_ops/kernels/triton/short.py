"""Short rows: all of a row in one tile, so that nothing is carried from tile to tile and no maximum is revised."""

import triton
import triton.language as tl

from .forward import NO_COLUMN
from .numerics import (
    LN2,
    LOG2E,
    activate,
    activation_of,
    bounded,
    row_offset,
    scale_of,
    tanh_residual,
    without_infinity,
)
from .row_outputs import finish, shift_of, target_logit


@triton.jit(
    do_not_specialize=["n_rows", "ignore_index"],
    do_not_specialize_on_alignment=["n_inner"],
)
def short_kernel(
    logits_ptr,  # (outer, inner, V), rows of any stride
    target_ptr,  # (N,), contiguous, any integer dtype
    weight_ptr,  # (V,) in the accumulator's dtype
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    argmax_ptr,  # (N,) int64
    entropy_ptr,  # (N,)
    lse_low_ptr,  # (N,): what the lse's rounding took
    n_rows: "i32",
    n_cols,
    n_inner,
    stride_outer,
    stride_inner,
    ignore_index: "i64",
    label_smoothing: "fp64",
    softcap: "fp64",
    logit_scale: "fp64",
    FLAGS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # V or more
    VECTOR: tl.constexpr,  # elements in 16 bytes; all rows start and end on 16-byte boundaries
):
    """ROWS rows a program. logit_scale must be positive: then the largest logit has the largest x."""
    ACC: tl.constexpr = loss_ptr.dtype.element_ty
    label_smoothing = tl.cast(label_smoothing, ACC)
    act = activation_of(softcap, logit_scale, ACC)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < n_rows
    # Both are multiples of VECTOR already; this tells Triton's alignment analysis, as in numerics.aligned_body.
    row_ptr = logits_ptr + row_offset(row, n_inner, stride_outer, stride_inner) // VECTOR * VECTOR
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < n_cols // VECTOR * VECTOR
    counted = exists
    if FLAGS.skip_ignored:
        target = tl.load(target_ptr + row, mask=exists, other=0).to(tl.int64)
        counted &= target != ignore_index
    read = counted[:, None] & inside
    # Without a softcap, x / logit_scale replaces x: each element takes one multiplication and one select less.
    z = tl.load(row_ptr[:, None] + columns, mask=read, other=0.0 if FLAGS.softcap else float("-inf"))
    if not FLAGS.skip_ignored:
        target = tl.load(target_ptr + row, mask=exists, other=0).to(tl.int64)
    valid = (target >= 0) & (target < n_cols) & counted
    x_target = target_logit(row_ptr, target, valid, act, FLAGS)
    shift = shift_of(x_target, FLAGS)

    z = z.to(ACC)
    if FLAGS.softcap == 2:
        unit = tl.cast(LN2, ACC)
        x = bounded(tanh_residual(z, act, True), act, 0.0)
    elif FLAGS.softcap == 1:
        unit = tl.cast(1.0, ACC)
        x = activate(z, act, FLAGS)
    else:
        unit = scale_of(act)
        x = z
    zero = tl.zeros([ROWS], ACC)
    moment, smooth, weights, top = zero, zero, zero, zero
    first = tl.zeros([ROWS], tl.int32)
    if FLAGS.smoothing:
        relative = x * unit - shift[:, None]
        if FLAGS.weight:
            w = tl.load(weight_ptr + columns, mask=inside, other=0.0)
            relative *= w
            weights += tl.sum(w, axis=1)
        if not (FLAGS.weight and FLAGS.softcap):  # 0 times something finite is 0 already
            relative = tl.where(inside, relative, 0.0)
        smooth = tl.sum(relative, axis=1)
    if FLAGS.argmax:
        z = tl.where(inside, z * scale_of(act), float("-inf"))
        top = tl.max(z, axis=1)
        first = tl.min(tl.where(z == top[:, None], columns, NO_COLUMN), axis=1)
    if FLAGS.softcap:
        x = tl.where(inside, x, float("-inf"))
    if FLAGS.softcap == 2:
        maximum = zero
        distance = x
        e = tl.exp2(x)
    else:
        maximum = tl.max(x, axis=1)
        distance = x - without_infinity(maximum)[:, None]
        e = tl.exp2(distance * (LOG2E * unit))
    if FLAGS.entropy:
        moment = unit * tl.sum(tl.where(e == 0.0, 0.0, e * distance), axis=1)
    finish(
        row, exists, n_cols, target, valid, x_target, shift, maximum * unit, tl.sum(e, axis=1), moment, smooth, weights,
        first, weight_ptr, loss_ptr, lse_ptr, argmax_ptr, entropy_ptr, lse_low_ptr, ignore_index, label_smoothing,
        FLAGS,
    )  # fmt: skip
