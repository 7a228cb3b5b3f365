"""Row operators for class-probability targets (soft targets, distillation)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reference_soft
from ..kernels.options import Options
from . import soft_checks
from .cross_entropy import gradient, rows
from .library import autograd, needs_grad, operator
from .second_order import differentiate, save_all


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    logits, target, weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, output[1], weight)
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_loss is None and grad_lse is None:
        return (None,) * 4
    logits, target, lse, weight = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(()).expand(lse.shape)
    needs_logits, needs_target, needs_weight = (needs_grad(ctx, position) for position in range(3))
    grad_logits = grad_target = grad_weight = None
    if needs_logits:
        grad_logits = torch.ops.xent.soft_cross_entropy_backward(
            grad_loss, grad_lse, logits, target, lse, weight, **ctx.options
        )
    if needs_target or needs_weight:
        grad_target, grad_weight = reference_soft.soft_target_gradients(
            grad_loss, logits, target, lse, weight, options=Options(**ctx.options)
        )
    return grad_logits, grad_target if needs_target else None, grad_weight if needs_weight else None, None


def _second_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return differentiate(
        reference_soft.soft_cross_entropy_backward, ctx.saved_tensors, ctx.needs_input_grad, ctx.options, grad
    )


operator(
    "soft_cross_entropy_forward",
    check=soft_checks.forward,
    outputs=rows,
    reference=reference_soft.soft_cross_entropy_forward,
    check_values=soft_checks.values,
    ascend=True,
)
autograd("soft_cross_entropy_forward", _backward, _setup_context)

operator(
    "soft_cross_entropy_backward",
    check=soft_checks.backward,
    outputs=gradient,
    reference=reference_soft.soft_cross_entropy_backward,
    ascend=True,
)
autograd("soft_cross_entropy_backward", _second_backward, save_all)
