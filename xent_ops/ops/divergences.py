"""Operators for a token's divergences from logits: their values and, from a coefficient of each, the gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import reference_divergences as reference
from .contract import Call
from .formulas import GradientsByName, autograd, needs_grad, run, save_for, save_nothing, saved
from .library import operator
from .rules import check_targets
from .second_order import refuse_second_derivatives


def _save(ctx: Any, call: Call, output: tuple[Tensor, Tensor]) -> None:
    if call.class_start is not None and needs_grad(ctx, "logits"):
        raise RuntimeError(
            "divergences over a slice of the classes have no derivative: call xent::divergences_forward on detached "
            "logits, or use xent_ops.linear_distillation_loss(shard=...)"
        )
    _, statistics = output
    ctx.mark_non_differentiable(statistics)
    save_for(ctx, "divergences_backward", call, statistics=statistics)


def _backward(ctx: Any, grad_values: Tensor, _: None) -> GradientsByName:
    return {"logits": run("divergences_backward", saved(ctx) | {"grad_values": grad_values})}


operator("divergences_forward", reference.divergences_forward, check_values=check_targets)
autograd("divergences_forward", _backward, _save, constants=("teacher_logits",))

operator("divergences_backward", reference.divergences_backward, check_values=check_targets)
autograd("divergences_backward", refuse_second_derivatives, save_nothing)

operator("divergences_with_grad", reference.divergences_with_grad, check_values=check_targets)
autograd("divergences_with_grad", refuse_second_derivatives, save_nothing)
