"""Operators for class-index targets: losses and statistics of rows, reduced losses, and the backward of all of them.

The reduced loss is one number with what it was divided by; further terms of a loss are plain torch on the rows' lse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reductions, reference
from . import backward_checks, checks
from .library import Outputs, autograd, needs_grad, operator
from .second_order import differentiate, no_second_derivative, save_all


def rows(logits: Tensor, *_: Any) -> Outputs:
    """Shape and dtype of loss and lse."""
    return ((logits.shape[:-1], reference.accumulator(logits)),) * 2


def _reduced(logits: Tensor, *_: Any) -> Outputs:
    dtype = reference.accumulator(logits)
    return ((), dtype), ((2,), dtype), (logits.shape[:-1], dtype)


def gradient(grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *rest: Any) -> Outputs:
    return ((logits.shape, (rest[9] if len(rest) > 9 else None) or logits.dtype),)


def _statistics(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
) -> Outputs:
    return statistics_of(logits, logits.shape[:-1], with_argmax, with_entropy)


def statistics_of(input: Tensor, shape: Any, with_argmax: bool, with_entropy: bool) -> Outputs:
    """Loss, lse, argmax, entropy, of this shape."""
    dtype = reference.accumulator(input)
    return (
        (shape, dtype),
        (shape, dtype),
        (shape if with_argmax else (0,), torch.int64),
        (shape if with_entropy else (0,), dtype),
    )


def _save_rows(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    """Keep the logits, the target and one float a row: the backward makes the softmax again from the lse."""
    logits, target, weight, _, with_entropy = inputs
    if needs_grad(ctx, 2):
        checks.weight_needs_grad()
    _loss, lse, argmax, entropy = output
    ctx.set_materialize_grads(False)  # an unused lse then costs no zeros(N)
    ctx.mark_non_differentiable(argmax, *(() if with_entropy else (entropy,)))
    ctx.save_for_backward(logits, target, lse, weight, entropy if with_entropy else None)
    ctx.options = keyword_only_inputs


def _rows_backward(
    ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, _: None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_loss is None and grad_lse is None and grad_entropy is None:
        return (None,) * 5
    logits, target, lse, weight, entropy = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(())
    rest = (target, lse, weight, None, grad_entropy, None if grad_entropy is None else entropy)
    return torch.ops.xent.cross_entropy_backward(grad_loss, grad_lse, logits, *rest, **ctx.options), *(None,) * 4


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


def _save_backward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    *tensors, _class_start, ctx.num_classes, ctx.grad_dtype = inputs
    save_all(ctx, tuple(tensors), keyword_only_inputs, output)


def _second_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.num_classes is not None or ctx.grad_dtype is not None:
        no_second_derivative()
    needs = [needs_grad(ctx, position) for position in range(len(ctx.saved_tensors))]
    given = differentiate(reference.cross_entropy_backward, ctx.saved_tensors, needs, ctx.options, grad)
    return *given, None, None, None


operator(
    "cross_entropy_forward",
    check=checks.index_statistics,
    outputs=_statistics,
    reference=reference.statistics,
    check_values=checks.index_values,
    ascend=True,
)
autograd("cross_entropy_forward", _rows_backward, _save_rows)

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
    check=backward_checks.index_backward,
    outputs=gradient,
    reference=reference.cross_entropy_backward,
    ascend=True,
)
autograd("cross_entropy_backward", _second_backward, _save_backward)
