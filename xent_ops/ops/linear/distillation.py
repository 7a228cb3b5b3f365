"""Operators for distillation from hidden states: losses of rows, and one operator that also computes the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...head import distillation as head_distillation
from ...head.float16 import split_loss
from ...kernels.options import LossOptions, RowOptions
from ..checks import divisor_needs_grad
from ..contract import Call
from ..distillation import refuse_derivatives
from ..distillation_checks import teacher_needs_grad
from ..library import Gradients, autograd, needs_grad, operator, run_backward, save_for, save_nothing
from .operators import SUMS, by_name, give_away_once, keep_gradients, mask_of


def _refuse_gradients_of_teacher(ctx: Any) -> None:
    for name in ("teacher_input", "teacher_weight", "teacher_bias"):
        if needs_grad(ctx, name):
            teacher_needs_grad(name)


def _save(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    _refuse_gradients_of_teacher(ctx)
    if needs_grad(ctx, "divisor"):
        divisor_needs_grad()
    _value, divisors, *gradients = output
    ctx.mark_non_differentiable(divisors, *gradients)
    loss = LossOptions(RowOptions(call.ignore_index))
    split = split_loss(call.input.dtype, divisors, call.target, call.token_weight, loss=loss)
    keep_gradients(ctx, call, gradients, split)


def _backward(ctx: Any, grad_value: Tensor, *_: None) -> Gradients:
    if torch.is_grad_enabled():  # create_graph=True
        refuse_derivatives(ctx)
    return give_away_once(ctx, grad_value)


def _save_rows(ctx: Any, call: Call, output: tuple[Tensor, Tensor]) -> None:
    _refuse_gradients_of_teacher(ctx)
    ctx.mark_non_differentiable(output[1])
    save_for(ctx, "linear_distillation_backward", call, statistics=output[1])


def _rows_backward(ctx: Any, grad_loss: Tensor, _: None) -> Gradients:
    mask = mask_of(ctx)
    return by_name(mask, run_backward(ctx, grad_loss, output_mask=mask))


operator("linear_distillation_forward", reference=head_distillation.statistics, calls_operators=True)
autograd("linear_distillation_forward", _rows_backward, _save_rows)

operator("linear_distillation_backward", reference=head_distillation.gradients, calls_operators=True)
autograd("linear_distillation_backward", refuse_derivatives, save_nothing)

operator("linear_distillation_with_grad", reference=head_distillation.with_grad, results=SUMS, calls_operators=True)
autograd("linear_distillation_with_grad", _backward, _save)
