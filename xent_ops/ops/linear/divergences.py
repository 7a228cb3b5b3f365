"""Operators for divergences of two heads, of all rows. The loop over chunks (head/loop.py) needs none of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...head import divergences
from ...head.float16 import split_loss
from ...kernels.options import LossOptions, RowOptions
from ..contract import Call, classes_of
from ..distillation_checks import class_values
from ..formulas import GradientsByName, autograd, run, save_for, save_nothing, saved
from ..library import operator
from ..rules import check_targets
from ..second_order import no_second_derivative, refuse_second_derivatives
from .operators import SUMS, by_name, give_away_once, keep_gradients, mask_of

_TEACHER_HEAD = ("teacher_input", "teacher_weight", "teacher_bias")


def _check_values(call: Call) -> None:
    check_targets(call)
    classes = call.classes if call.classes is None else call.classes[: classes_of(call)]
    class_values(classes, call.teacher_weight.shape[0])


def _save(ctx: Any, call: Call, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, statistics, tops = output
    ctx.mark_non_differentiable(statistics, tops)
    save_for(ctx, "linear_divergences_backward", call, statistics=statistics)


def _backward(ctx: Any, grad_values: Tensor, *_: None) -> GradientsByName:
    mask = mask_of(ctx)
    values = saved(ctx) | {"grad_values": grad_values, "output_mask": mask}
    return by_name(mask, run("linear_divergences_backward", values))


def _save_with_grad(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    _value, divisors, *gradients = output
    ctx.mark_non_differentiable(divisors, *gradients)
    loss = LossOptions(RowOptions(call.ignore_index))
    split = split_loss(call.input.dtype, divisors, call.target, call.token_weight, loss=loss)
    keep_gradients(ctx, call, gradients, split)


def _with_grad_backward(ctx: Any, grad_value: Tensor, *_: None) -> GradientsByName:
    if torch.is_grad_enabled():  # create_graph=True
        no_second_derivative()
    return give_away_once(ctx, grad_value)


operator("linear_divergences_with_grad", divergences.linear_divergences_with_grad, results=SUMS, calls_operators=True)
autograd("linear_divergences_with_grad", _with_grad_backward, _save_with_grad, constants=(*_TEACHER_HEAD, "divisor"))

operator(
    "linear_divergences_forward",
    divergences.linear_divergences_forward,
    check_values=_check_values,
    calls_operators=True,
)
autograd("linear_divergences_forward", _backward, _save, constants=_TEACHER_HEAD)

operator("linear_divergences_backward", divergences.linear_divergences_backward, calls_operators=True)
autograd("linear_divergences_backward", refuse_second_derivatives, save_nothing)
