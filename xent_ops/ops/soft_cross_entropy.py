"""Row operators for class-probability targets (soft targets, distillation)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import reference_soft
from ..kernels.options import as_record
from ..kernels.reference import accumulator
from . import checks
from .contract import Call
from .formulas import GradientsByName, autograd, needs_grad, run_backward, save_for, saved
from .library import operator
from .second_order import differentiate_call, save_all


def check_values(call: Call) -> None:
    if getattr(call, "check_target", True):
        checks.refuse_log_probabilities("target of class probabilities", call.probabilities, accumulator(call.logits))


def _save(ctx: Any, call: Call, output: tuple[Tensor, Tensor]) -> None:
    save_for(ctx, "soft_cross_entropy_backward", call, lse=output[1])


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None) -> GradientsByName:
    values = saved(ctx)
    if grad_loss is None:
        grad_loss = values["lse"].new_zeros(()).expand(values["lse"].shape)
    gradients: dict[str, Tensor | None] = {}
    if needs_grad(ctx, "logits"):
        gradients["logits"] = run_backward(ctx, grad_loss, values, grad_lse=grad_lse)
    if needs_grad(ctx, "probabilities") or needs_grad(ctx, "weight"):
        names = ("logits", "probabilities", "lse", "weight")
        target_grads = reference_soft.soft_target_gradients(
            grad_loss, *[values[name] for name in names], options=as_record(values)["options"]
        )
        named_grads = zip(("probabilities", "weight"), target_grads, strict=True)
        gradients |= {name: grad for name, grad in named_grads if needs_grad(ctx, name)}
    return gradients


def _second_backward(ctx: Any, grad: Tensor) -> GradientsByName:
    return differentiate_call(reference_soft.soft_cross_entropy_backward, ctx, grad)


operator(
    "soft_cross_entropy_forward",
    reference_soft.soft_cross_entropy_forward,
    check_values=check_values,
    ascend=True,
)
autograd("soft_cross_entropy_forward", _backward, _save)

operator(
    "soft_cross_entropy_backward",
    reference_soft.soft_cross_entropy_backward,
    arguments={"grad_loss": ("float", "...", "one value for each row of the logits")},
    ascend=True,
)
autograd("soft_cross_entropy_backward", _second_backward, save_all)
