"""Operators of the head and the loss as one: rows, whose backward makes the logits again, and the one pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...kernels import reference, reference_linear
from ...kernels.options import Chunking, as_record
from ...kernels.reference_linear import with_entropy
from .. import transforms
from ..checks import scale_grad, weight_needs_grad
from ..library import Outputs, autograd, needs_grad, operator, save_nothing
from ..second_order import differentiate
from . import checks, chunks
from .products import accumulator_of_weight

_ops = torch.ops.xent


def _rows(input: Tensor, *_: Any) -> Outputs:
    """Shape and dtype of loss and lse."""
    return ((input.shape[:-1], reference.accumulator(input)),) * 2


def gradients_of(position: int) -> Any:
    """The outputs of a backward with the input at this position, the mask as its last argument."""

    def outputs(*args: Any) -> Outputs:
        input, linear_weight = args[position : position + 2]
        mask = args[-1] if isinstance(args[-1], (list, tuple)) else (True, True, True)
        shapes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
        return tuple((shape if wanted else (0,), input.dtype) for shape, wanted in zip(shapes, mask, strict=True))

    return outputs


def _with_grad_outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    output_mask: Any = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
) -> Outputs:
    dtype = reference.accumulator(input)
    grad_input, grad_weight, grad_bias = gradients_of(0)(input, linear_weight, output_mask)
    return (
        ((), dtype),
        ((2,), dtype),
        (input.shape[:-1], dtype),
        grad_input,
        (grad_weight[0], accumulator_of_weight(input.dtype, accumulate_dtype)),
        (grad_bias[0], dtype),
    )


def _save_rows(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    input, linear_weight, target, linear_bias, weight = inputs
    if needs_grad(ctx, 4):
        weight_needs_grad()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, linear_weight, target, output[1], linear_bias, weight, *output[2:])
    ctx.options = keyword_only_inputs


def _mask(ctx: Any) -> list[bool]:
    return [needs_grad(ctx, position) for position in (0, 1, 3)]


def _of_inputs(mask: list[bool], gradients: Any, others: int) -> tuple[Tensor | None, ...]:
    """The gradients as those of (input, linear_weight, target, linear_bias, others)."""
    grad_input, grad_weight, grad_bias = (
        grad if wanted else None for grad, wanted in zip(gradients, mask, strict=True)
    )
    return grad_input, grad_weight, None, grad_bias, *(None,) * others


def _save_rows_and_argmax(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _save_rows(ctx, inputs, keyword_only_inputs, output[:2])
    ctx.mark_non_differentiable(output[2])


def _rows_backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None and grad_lse is None:
        return (None,) * 5
    input, linear_weight, target, lse, linear_bias, weight = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(())
    rows = (input, linear_weight, target, lse, linear_bias, weight)
    mask = _mask(ctx)
    gradients = _ops.linear_cross_entropy_backward(grad_loss, grad_lse, *rows, None, mask, **ctx.options)
    return _of_inputs(mask, gradients, 1)


def _entropy_backward(
    ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_loss is None and grad_lse is None and grad_entropy is None:
        return (None,) * 5
    input, linear_weight, target, lse, linear_bias, weight, entropy = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(()).expand(lse.shape)
    rows = (input, linear_weight, target, lse, entropy, linear_bias, weight)
    mask = _mask(ctx)
    gradients = _ops.linear_cross_entropy_backward_entropy(
        grad_loss, grad_lse, grad_entropy, *rows, mask, **ctx.options
    )
    return _of_inputs(mask, gradients, 1)


def _save_one_pass(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    input, linear_weight, target, linear_bias, weight, _, made, ctx.accumulate_dtype = inputs
    ctx.mask = [bool(wanted and needed) for wanted, needed in zip(made, _mask(ctx), strict=True)]
    if needs_grad(ctx, 4):
        weight_needs_grad()
    if needs_grad(ctx, 5):
        checks.divisor_needs_grad()
    _value, divided_by, lse, *gradients = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(input, linear_weight, target, lse, linear_bias, weight, divided_by)
    ctx.options = dict(keyword_only_inputs)
    ctx.options.pop("reduction", None)
    # An attribute, not saved tensors: the first backward scales the gradients in place and gives them away.
    ctx.gradients = gradients


def _one_pass_backward(ctx: Any, grad_value: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_value is None:
        return (None,) * 8
    input, linear_weight, target, lse, linear_bias, weight, divided_by = ctx.saved_tensors
    gradients = ctx.gradients
    # Compiled autograd traces this, and replays no change of ctx: there the gradients stay as they are.
    traced = torch.compiler.is_compiling()
    if not traced:
        ctx.gradients = None
    differentiable = torch.is_grad_enabled()  # create_graph=True
    if gradients is None or differentiable:
        if differentiable:  # made again, since it depends on the logits
            head = (input, linear_weight, target, linear_bias, weight)
            options = {name: value for name, value in ctx.options.items() if name != "lse_square_scale"}
            lse = _ops.linear_cross_entropy_forward(*head, **options)[1]
        rows = (input, linear_weight, target, lse, linear_bias, weight, divided_by)
        gradients = _ops.linear_cross_entropy_backward(
            grad_value, None, *rows, ctx.mask, accumulate_dtype=ctx.accumulate_dtype, **ctx.options
        )
        return _of_inputs(ctx.mask, gradients, 4)
    factor = grad_value
    if input.dtype == torch.float16:
        factor = grad_value / chunks.divisor_after_products(divided_by)
    in_place = not traced and not transforms.is_batch(grad_value)
    scaled = []
    for gradient, wanted in zip(gradients, ctx.mask, strict=True):
        if wanted and in_place and type(gradient) is Tensor:
            _ops.scale_grad_(gradient, factor)
        elif wanted:
            gradient = _ops.linear_scale_grad(gradient, factor)
        scaled.append(gradient.to(input.dtype))
    return _of_inputs(ctx.mask, scaled, 4)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    *tensors, ctx.mask = inputs
    ctx.save_for_backward(*tensors)
    # How the chunks are made and added up is nothing to a derivative in plain torch.
    left_out = ("accumulate_dtype", *Chunking._fields)
    ctx.options = as_record({name: value for name, value in keyword_only_inputs.items() if name not in left_out})


def _second_backward_of(function: Callable[..., Any]) -> Callable[..., tuple[Tensor | None, ...]]:
    """By autograd through plain torch, with all logits at once."""

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        needs = [needs_grad(ctx, i) for i in range(len(tensors))]
        masked = functools.partial(function, output_mask=ctx.mask)
        return *differentiate(masked, tensors, needs, ctx.options, grads), None

    return backward


def _no_derivative(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::linear_scale_grad has no derivative, for the gradient that it scales is a constant to autograd; for a "
        "second derivative use xent_ops.cross_entropy of torch.nn.functional.linear"
    )


operator(
    "linear_cross_entropy_forward",
    check=checks.rows,
    outputs=_rows,
    reference=chunks.forward(_ops.cross_entropy_forward, 0.0, math.inf),
    composed=True,
)
autograd("linear_cross_entropy_forward", _rows_backward, _save_rows)

operator(
    "linear_cross_entropy_forward_argmax",
    check=checks.rows,
    outputs=lambda input, *_: (*_rows(input), (input.shape[:-1], torch.int64)),
    reference=chunks.forward(_ops.cross_entropy_forward_argmax, 0.0, math.inf, -1),
    composed=True,
)
autograd("linear_cross_entropy_forward_argmax", _rows_backward, _save_rows_and_argmax)

operator(
    "linear_cross_entropy_forward_entropy",
    check=checks.rows,
    outputs=lambda input, *_: (*_rows(input), *_rows(input)[:1]),
    reference=chunks.forward(_ops.cross_entropy_forward_entropy, 0.0, math.inf, 0.0),
    composed=True,
)
autograd("linear_cross_entropy_forward_entropy", _entropy_backward, _save_rows)

operator(
    "linear_cross_entropy_backward",
    check=checks.backward,
    outputs=gradients_of(2),
    reference=chunks.linear_cross_entropy_backward,
    composed=True,
)
autograd(
    "linear_cross_entropy_backward",
    _second_backward_of(reference_linear.linear_cross_entropy_backward),
    _save_backward,
)

operator(
    "linear_cross_entropy_backward_entropy",
    check=with_entropy(checks.backward),
    outputs=gradients_of(3),
    reference=with_entropy(chunks.linear_cross_entropy_backward),
    composed=True,
)
autograd(
    "linear_cross_entropy_backward_entropy",
    _second_backward_of(with_entropy(reference_linear.linear_cross_entropy_backward)),
    _save_backward,
)

operator(
    "linear_cross_entropy_with_grad",
    check=checks.with_grad,
    outputs=_with_grad_outputs,
    reference=chunks.linear_cross_entropy_with_grad,
    composed=True,
)
autograd("linear_cross_entropy_with_grad", _one_pass_backward, _save_one_pass)

operator(
    "linear_scale_grad",
    check=scale_grad,
    outputs=lambda grad, factor: ((grad.shape, grad.dtype),),
    reference=chunks.scaled,
    composed=True,
)
autograd("linear_scale_grad", _no_derivative, save_nothing)
