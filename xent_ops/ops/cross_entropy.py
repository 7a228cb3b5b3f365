"""Operators for class-index targets: losses of rows, with an argmax, reduced, and the backward of all of them.

The reduced loss is one number with what it was divided by; further terms of a loss are plain torch on the rows' lse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reductions, reference
from . import checks
from .library import Outputs, autograd, needs_grad, operator
from .second_order import differentiate, save_all


def rows(logits: Tensor, *_: Any) -> Outputs:
    """Shape and dtype of loss and lse."""
    return ((logits.shape[:-1], reference.accumulator(logits)),) * 2


def _reduced(logits: Tensor, *_: Any) -> Outputs:
    dtype = reference.accumulator(logits)
    return ((), dtype), ((2,), dtype), (logits.shape[:-1], dtype)


def gradient(grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *_: Any) -> Outputs:
    return ((logits.shape, logits.dtype),)


def save_rows(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    """Keep the logits, the target and one float a row: the backward makes the softmax again from the lse."""
    logits, target, weight = inputs
    if needs_grad(ctx, 2):
        checks.weight_needs_grad()
    ctx.set_materialize_grads(False)  # an unused lse then costs no zeros(N)
    ctx.save_for_backward(logits, target, output[1], weight)
    ctx.options = keyword_only_inputs
    if len(output) > 2:
        ctx.mark_non_differentiable(*output[2:])


def _rows_backward(
    ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: None
) -> tuple[Tensor | None, None, None]:
    if grad_loss is None and grad_lse is None:
        return None, None, None
    logits, target, lse, weight = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(())
    grad = torch.ops.xent.cross_entropy_backward(grad_loss, grad_lse, logits, target, lse, weight, **ctx.options)
    return grad, None, None


def _save_reduced(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]
) -> None:
    logits, target, weight = inputs
    if needs_grad(ctx, 2):
        checks.weight_needs_grad()
    _value, divisor, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(divisor, lse)
    ctx.options = dict(keyword_only_inputs)
    mean = ctx.options.pop("reduction", "mean") == "mean"
    ctx.save_for_backward(logits, target, lse, weight, divisor if mean else None)


def _reduced_backward(ctx: Any, grad_value: Tensor | None, *_: None) -> tuple[Tensor | None, None, None]:
    if grad_value is None:
        return None, None, None
    logits, target, lse, weight, divisor = ctx.saved_tensors
    if torch.is_grad_enabled():  # The gradient is differentiated in its turn: with an lse that depends on the logits.
        rows = {name: value for name, value in ctx.options.items() if name != "lse_square_scale"}
        lse = torch.ops.xent.cross_entropy_forward(logits, target, weight, **rows)[1]
    rest = (logits, target, lse, weight, divisor)
    return torch.ops.xent.cross_entropy_backward(grad_value, None, *rest, **ctx.options), None, None


def _second_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return differentiate(reference.cross_entropy_backward, ctx.saved_tensors, ctx.needs_input_grad, ctx.options, grad)


operator(
    "cross_entropy_forward",
    check=checks.index_forward,
    outputs=rows,
    reference=reference.cross_entropy_forward,
    check_values=checks.index_values,
    ascend=True,
)
autograd("cross_entropy_forward", _rows_backward, save_rows)

operator(
    "cross_entropy_forward_argmax",
    check=checks.index_forward,
    outputs=lambda logits, *_: (*rows(logits), (logits.shape[:-1], torch.int64)),
    reference=reference.cross_entropy_forward_argmax,
    check_values=checks.index_values,
    ascend=True,
)
autograd("cross_entropy_forward_argmax", _rows_backward, save_rows)

operator(
    "cross_entropy_reduced",
    check=checks.index_reduced,
    outputs=_reduced,
    reference=reductions.cross_entropy_reduced,
    check_values=checks.index_values,
    ascend=True,
)
autograd("cross_entropy_reduced", _reduced_backward, _save_reduced)

operator(
    "cross_entropy_backward",
    check=checks.index_backward,
    outputs=gradient,
    reference=reference.cross_entropy_backward,
    ascend=True,
)
autograd("cross_entropy_backward", _second_backward, save_all)
