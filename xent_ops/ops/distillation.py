"""Operators of distillation of given logits: losses of rows and their backward, and both in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reference_distillation as reference
from ..kernels.reference import accumulator
from . import distillation_checks as checks
from .library import Outputs, autograd, needs_grad, operator


def _rows(logits: Tensor, teacher_logits: Tensor, target: Tensor, *_: Any) -> Outputs:
    dtype = accumulator(logits)
    return (target.shape, dtype), ((reference.STATISTICS, *target.shape), dtype)


def _with_grad(logits: Tensor, teacher_logits: Tensor, target: Tensor, grad_scale: Tensor) -> Outputs:
    return (target.shape, accumulator(logits)), (logits.shape, logits.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    logits, teacher_logits, target, _, class_start = inputs
    if needs_grad(ctx, 1):
        checks.teacher_needs_grad("teacher_logits")
    if class_start is not None and needs_grad(ctx, 0):
        raise RuntimeError(
            "the divergence over a slice of the classes has no derivative: call xent::distillation_forward on detached "
            "logits, or use xent_ops.distributed.vocab_parallel_linear_distillation_loss"
        )
    _loss, statistics = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(logits, teacher_logits, target, statistics)
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, grad_loss: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 5
    return torch.ops.xent.distillation_backward(grad_loss, *ctx.saved_tensors, **ctx.options), *(None,) * 4


def save_for_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any, **keywords: Any) -> None:
    ctx.number = len(inputs)


def refuse_derivatives(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    if any(needs_grad(ctx, position) for position in range(ctx.number)):
        raise RuntimeError(
            "a distillation loss has no second derivative, and operators that return its gradient have none: write it "
            "in plain torch, of the log_softmax of both logits"
        )
    return (None,) * ctx.number


operator(
    "distillation_forward",
    check=checks.forward,
    outputs=_rows,
    reference=reference.distillation_forward,
    check_values=checks.values,
)
autograd("distillation_forward", _backward, _save)

operator(
    "distillation_backward",
    check=checks.backward,
    outputs=lambda grad_loss, logits, *_: ((logits.shape, logits.dtype),),
    reference=reference.distillation_backward,
    check_values=checks.backward_values,
)
autograd("distillation_backward", refuse_derivatives, save_for_nothing)

operator(
    "distillation_with_grad",
    check=checks.with_grad,
    outputs=_with_grad,
    reference=reference.distillation_with_grad,
    check_values=checks.values,
)
autograd("distillation_with_grad", refuse_derivatives, save_for_nothing)
