"""Operators of distillation from hidden states: losses of rows, and the one pass that makes the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...head import distillation as of_heads
from ...head.float16 import split_divisors
from ...kernels.options import LossOptions, Options
from .. import transforms
from ..checks import divisor_needs_grad
from ..contract import Call
from ..distillation import refuse_derivatives
from ..distillation_checks import teacher_needs_grad
from ..library import Gradients, autograd, needs_grad, operator, run_backward, save_for, save_nothing
from .operators import SUMS, given_away, mask_of, wanted


def _refuse_gradients_of_teacher(ctx: Any) -> None:
    for name in ("teacher_input", "teacher_weight", "teacher_bias"):
        if needs_grad(ctx, name):
            teacher_needs_grad(name)


def _save(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    ctx.mask = [bool(made and needed) for made, needed in zip(call.output_mask, mask_of(ctx), strict=True)]
    _refuse_gradients_of_teacher(ctx)
    if needs_grad(ctx, "divisor"):
        divisor_needs_grad()
    _value, divisors, *gradients = output
    ctx.mark_non_differentiable(divisors, *gradients)
    ctx.dtype = call.input.dtype
    ctx.loss = LossOptions(Options(call.ignore_index))
    if ctx.dtype == torch.float16:
        ctx.save_for_backward(divisors, call.target, call.token_weight)
    # An attribute, not saved tensors: the first backward scales the gradients in place and gives them away.
    ctx.gradients = gradients


def _backward(ctx: Any, grad_value: Tensor, *_: None) -> Gradients:
    if torch.is_grad_enabled():  # create_graph=True
        refuse_derivatives(ctx)
    if ctx.gradients is None:
        raise RuntimeError(
            "the gradients of this loss were given away by its first backward, which did not ask for retain_graph=True"
        )
    gradients, factor = ctx.gradients, grad_value
    if ctx.dtype == torch.float16:
        divisors, target, token_weight = ctx.saved_tensors
        later = split_divisors(ctx.dtype, divisors, target, token_weight, loss=ctx.loss)[1]
        assert later is not None
        factor = grad_value / later
    # Compiled autograd traces this, and replays no change of ctx: there the gradients stay as they are.
    traced = torch.compiler.is_compiling()
    keep = traced or transforms.is_batch(grad_value) or transforms.keep_graph()
    if not keep:
        ctx.gradients = None
    return wanted(ctx.mask, given_away(gradients, factor, ctx.mask, ctx.dtype, keep))


def _save_rows(ctx: Any, call: Call, output: tuple[Tensor, Tensor]) -> None:
    _refuse_gradients_of_teacher(ctx)
    ctx.mark_non_differentiable(output[1])
    save_for(ctx, "linear_distillation_backward", call, statistics=output[1])


def _rows_backward(ctx: Any, grad_loss: Tensor, _: None) -> Gradients:
    mask = mask_of(ctx)
    return wanted(mask, run_backward(ctx, grad_loss, output_mask=mask))


operator("linear_distillation_forward", reference=of_heads.losses, composed=True)
autograd("linear_distillation_forward", _rows_backward, _save_rows)

operator("linear_distillation_backward", reference=of_heads.gradients, composed=True)
autograd("linear_distillation_backward", refuse_derivatives, save_nothing)

operator("linear_distillation_with_grad", reference=of_heads.with_grad, results=SUMS, composed=True)
autograd("linear_distillation_with_grad", _backward, _save)
