"""Operators for divergences of two heads: of all rows, and of one chunk of rows, or of a rank's slices of the heads.

head/loop.py has the loop over chunks. The caller's code runs between the chunk's operators, and the last two operators
of chunk.py are used here too::

    linear_divergences_chunk         a chunk's logits of both heads, and their packed values and statistics
    (divergences_forward             a slice's parts of the sums that need the lse's of all classes)
    linear_divergences_chunk_grad_   from upstream gradients of the values: the gradient, written over the student's
                                     logits, and the input's gradient; for a slice, this rank's part of it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...head import divergence_chunk, divergences
from ...head.float16 import split_loss
from ...kernels.divergences import FIELDS, STATISTICS
from ...kernels.options import LossOptions, RowOptions
from ..contract import Call, classes_of, packed_width
from ..distillation_checks import class_values
from ..formulas import Gradients, autograd, run, save_for, save_nothing, saved
from ..library import operator
from ..rules import check_targets
from ..second_order import no_second_derivative, refuse_second_derivatives
from .chunk import GRAD_INPUT, PADDED, one_chunk
from .operators import SUMS, by_name, give_away_once, keep_gradients, mask_of


def _statistics_shape(call: Call) -> tuple[int, ...]:
    if call.class_start is not None:
        return 1, packed_width(call)
    return len(FIELDS) + STATISTICS + 2 * call.with_tops, call.target.shape[0]


_TEACHER_HEAD = ("teacher_input", "teacher_weight", "teacher_bias")
_TEACHER = ("float", "... P", "as linear_divergences_chunk makes them")


def _check_values(call: Call) -> None:
    check_targets(call)
    classes = call.classes if call.classes is None else call.classes[: classes_of(call)]
    class_values(classes, call.teacher_weight.shape[0])


def _save(ctx: Any, call: Call, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    save_for(ctx, "linear_divergences_backward", call, statistics=output[1])


def _backward(ctx: Any, grad_values: Tensor, *_: None) -> Gradients:
    mask = mask_of(ctx)
    values = saved(ctx) | {"grad_values": grad_values, "output_mask": mask}
    return by_name(mask, run("linear_divergences_backward", values))


def _save_with_grad(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    _value, divisors, *gradients = output
    ctx.mark_non_differentiable(divisors, *gradients)
    loss = LossOptions(RowOptions(call.ignore_index))
    split = split_loss(call.input.dtype, divisors, call.target, call.token_weight, loss=loss)
    keep_gradients(ctx, call, gradients, split)


def _with_grad_backward(ctx: Any, grad_value: Tensor, *_: None) -> Gradients:
    if torch.is_grad_enabled():  # create_graph=True
        no_second_derivative()
    return give_away_once(ctx, grad_value)


operator("linear_divergences_with_grad", reference=divergences.with_grad, results=SUMS, calls_operators=True)
autograd("linear_divergences_with_grad", _with_grad_backward, _save_with_grad, constants=(*_TEACHER_HEAD, "divisor"))

operator(
    "linear_divergences_forward",
    reference=divergences.statistics,
    check_values=_check_values,
    calls_operators=True,
)
autograd("linear_divergences_forward", _backward, _save, constants=_TEACHER_HEAD)

operator("linear_divergences_backward", reference=divergences.gradients, calls_operators=True)
autograd("linear_divergences_backward", refuse_second_derivatives, save_nothing)

operator(
    "linear_divergences_chunk",
    reference=divergence_chunk.chunk,
    check_values=_check_values,
    results={"stats": ("acc", _statistics_shape, "")},
    rules=(one_chunk,),
    calls_operators=True,
)
operator(
    "linear_divergences_chunk_grad_",
    reference=divergence_chunk.chunk_grad_,
    arguments=PADDED | {"logits": _TEACHER, "teacher_logits": _TEACHER},
    results=GRAD_INPUT,
    rules=(one_chunk,),
    calls_operators=True,
    overwrites="logits",
)
