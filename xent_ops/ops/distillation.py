"""Operators for distillation from logits: losses of rows, their backward, and both in one operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import reference_distillation as reference
from . import distillation_checks as checks
from .contract import Call
from .library import Gradients, autograd, needs_grad, operator, run_backward, save_for, save_nothing
from .rules import check_targets


def _save(ctx: Any, call: Call, output: tuple[Tensor, Tensor]) -> None:
    if needs_grad(ctx, "teacher_logits"):
        checks.teacher_needs_grad("teacher_logits")
    if call.class_start is not None and needs_grad(ctx, "logits"):
        raise RuntimeError(
            "the divergence over a slice of the classes has no derivative: call xent::distillation_forward on detached "
            "logits, or use xent_ops.distributed.vocab_parallel_linear_distillation_loss"
        )
    ctx.mark_non_differentiable(output[1])
    save_for(ctx, "distillation_backward", call, statistics=output[1])


def _backward(ctx: Any, grad_loss: Tensor, _: None) -> Gradients:
    return {"logits": run_backward(ctx, grad_loss)}


def refuse_derivatives(ctx: Any, *grads: Tensor) -> Gradients:
    if any(ctx.needs_input_grad):
        raise RuntimeError(
            "a distillation loss has no second derivative, and operators that return its gradient have none: write it "
            "in plain torch, of the log_softmax of both logits"
        )
    return {}


operator(
    "distillation_forward",
    reference=reference.distillation_forward,
    check_values=check_targets,
)
autograd("distillation_forward", _backward, _save)

operator(
    "distillation_backward",
    reference=reference.distillation_backward,
    check_values=check_targets,
)
autograd("distillation_backward", refuse_derivatives, save_nothing)

operator(
    "distillation_with_grad",
    reference=reference.distillation_with_grad,
    check_values=check_targets,
)
autograd("distillation_with_grad", refuse_derivatives, save_nothing)
