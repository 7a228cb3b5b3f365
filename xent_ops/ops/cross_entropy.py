"""Operators for class-index targets: losses and statistics of rows, reduced losses, their backward, and both in one.

The reduced loss is returned with its divisors. Further terms of a loss are plain torch on the rows' lse.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..kernels import reductions, reference, reference_with_grad
from .contract import Call
from .formulas import GradientsByName, autograd, run, run_backward, save_for, saved
from .library import operator
from .rules import check_targets
from .second_order import differentiate_call, no_second_derivative, save_all, without_derivative


def save_rows(backward: str, ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    """Keep the logits, the target and one float per row: the backward computes the softmax again from the lse.

    Of a head, keep input and weight: the backward computes the logits again. With ids the loss is a constant.
    """
    loss, lse, argmax, entropy, lse_low, *at_ids = output
    results = {"lse": lse, "lse_low": lse_low, "entropy": entropy if call.with_entropy else None}
    constants = [argmax, lse_low, *(() if call.with_entropy else (entropy,))]
    if getattr(call, "ids", None) is None:
        constants += at_ids  # (0,), of a head alone
    else:
        constants.append(loss)
        (results["at_ids"],) = at_ids
    ctx.mark_non_differentiable(*constants)
    save_for(ctx, backward, call, **results)


def _rows_backward(ctx: Any, grad_loss: Any, grad_lse: Any, _: None, grad_entropy: Any, *__: None) -> GradientsByName:
    return {"logits": run_backward(ctx, grad_loss, grad_lse=grad_lse, grad_entropy=grad_entropy)}


def _save_reduced(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    _value, divisors, lse, lse_low = output
    ctx.mark_non_differentiable(divisors, lse, lse_low)
    results = {"lse": lse, "lse_low": lse_low, "divisors": divisors if call.reduction == "mean" else None}
    save_for(ctx, "cross_entropy_backward", call, **results)


def _reduced_backward(ctx: Any, grad_value: Tensor, *_: None) -> GradientsByName:
    kept = saved(ctx)
    if torch.is_grad_enabled():  # A second derivative needs an lse that depends on the logits.
        _, kept["lse"], _, _, kept["lse_low"] = run("cross_entropy_forward", kept)
    return {"logits": run_backward(ctx, grad_value, kept)}


def _second_backward(ctx: Any, grad: Tensor) -> GradientsByName:
    if ctx.options["num_classes"] is not None or ctx.options["grad_dtype"] is not None:
        no_second_derivative()
    return differentiate_call(reference.cross_entropy_backward, ctx, grad)


operator("cross_entropy_forward", reference.statistics, check_values=check_targets, ascend=True)
_save_rows = functools.partial(save_rows, "cross_entropy_backward")
autograd("cross_entropy_forward", _rows_backward, _save_rows, constants=("weight",))

operator("cross_entropy_reduced", reductions.cross_entropy_reduced, check_values=check_targets, ascend=True)
autograd("cross_entropy_reduced", _reduced_backward, _save_reduced, constants=("weight",))

operator("cross_entropy_backward", reference.cross_entropy_backward, ascend=True)
autograd("cross_entropy_backward", _second_backward, save_all)

# Loss and gradient in one pass over the logits, for upstream gradients that are known in the forward.
operator(
    "cross_entropy_with_grad",
    reference_with_grad.cross_entropy_with_grad,
    check_values=check_targets,
    ascend=True,
)
without_derivative(
    "cross_entropy_with_grad",
    ", since it returns the gradient itself: call it under torch.no_grad(), or use "
    "xent_ops.cross_entropy(..., grad_in_forward=True)",
)

operator("scale_grad_", reference_with_grad.scale_grad_, overwrites="grad")
