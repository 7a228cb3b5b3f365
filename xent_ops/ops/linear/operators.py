"""Operators of the head and the loss as one: rows, whose backward makes the logits again, and the one pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...head import chunks
from ...head.float16 import split_divisors
from ...head.products import accumulator_of_weight
from ...kernels import reference, reference_linear
from ...kernels.options import Chunking, LossOptions, as_record
from .. import transforms
from ..checks import scale_grad, weight_needs_grad
from ..cross_entropy import statistics_of
from ..library import Outputs, autograd, needs_grad, operator, save_nothing
from ..second_order import differentiate, no_second_derivative
from . import checks

_ops = torch.ops.xent


def _statistics(input: Tensor, *args: Any) -> Outputs:
    with_argmax, with_entropy = (*args[4:], False, False)[:2]
    return statistics_of(input, input.shape[:-1], with_argmax, with_entropy)


def _gradients(*args: Any) -> Outputs:
    """Of a backward: (grad_loss, grad_lse, input, linear_weight, ..., output_mask)."""
    return gradients_of(args[2], args[3], args[14] if len(args) > 14 else (True, True, True))


def gradients_of(input: Tensor, linear_weight: Tensor, mask: Any) -> Outputs:
    shapes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
    return tuple((shape if wanted else (0,), input.dtype) for shape, wanted in zip(shapes, mask, strict=True))


def _with_grad_outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    token_weight: Tensor | None = None,
    output_mask: Any = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
) -> Outputs:
    dtype = reference.accumulator(input)
    return (
        ((), dtype),
        ((2,), dtype),
        *statistics_of(input, input.shape[:-1], with_argmax, with_entropy),
        *sums_of(input, linear_weight, output_mask, accumulate_dtype),
    )


def sums_of(input: Tensor, linear_weight: Tensor, mask: Any, accumulate_dtype: torch.dtype | None) -> Outputs:
    """The gradients in the dtypes in which they are added up."""
    grad_input, grad_weight, grad_bias = gradients_of(input, linear_weight, mask)
    return (
        grad_input,
        (grad_weight[0], accumulator_of_weight(input.dtype, accumulate_dtype)),
        (grad_bias[0], reference.accumulator(input)),
    )


def _save_rows(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    input, linear_weight, target, linear_bias, weight, _, with_entropy = inputs
    if needs_grad(ctx, 4):
        weight_needs_grad()
    _loss, lse, argmax, entropy = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(argmax, *(() if with_entropy else (entropy,)))
    of_rows = (target, lse, linear_bias, weight, entropy if with_entropy else None)
    ctx.save_for_backward(input, linear_weight, *of_rows)
    ctx.options = keyword_only_inputs


def _mask(ctx: Any) -> list[bool]:
    return [needs_grad(ctx, position) for position in (0, 1, 3)]


def _of_inputs(mask: list[bool], gradients: Any, others: int) -> tuple[Tensor | None, ...]:
    """The gradients as those of (input, linear_weight, target, linear_bias, others)."""
    grad_input, grad_weight, grad_bias = (
        grad if wanted else None for grad, wanted in zip(gradients, mask, strict=True)
    )
    return grad_input, grad_weight, None, grad_bias, *(None,) * others


def _rows_backward(
    ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, _: None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_loss is None and grad_lse is None and grad_entropy is None:
        return (None,) * 7
    input, linear_weight, target, lse, linear_bias, weight, entropy = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(())
    rows = (input, linear_weight, target, lse, linear_bias, weight, None)
    of_entropy = (grad_entropy, None if grad_entropy is None else entropy)
    mask = _mask(ctx)
    gradients = _ops.linear_cross_entropy_backward(
        grad_loss, grad_lse, *rows, *of_entropy, None, 0, None, mask, **ctx.options
    )
    return _of_inputs(mask, gradients, 3)


def _save_with_grad(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    input, linear_weight, target, linear_bias, weight, _, token_weight, made, ctx.accumulate_dtype, *_ = inputs
    ctx.mask = [bool(wanted and needed) for wanted, needed in zip(made, _mask(ctx), strict=True)]
    if needs_grad(ctx, 4):
        weight_needs_grad()
    if needs_grad(ctx, 5):
        checks.divisor_needs_grad()
    _value, divided_by, row_loss, lse, argmax, entropy, *gradients = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(divided_by, row_loss, argmax, entropy, *gradients)
    ctx.save_for_backward(input, linear_weight, target, lse, linear_bias, weight, divided_by, token_weight)
    ctx.options = dict(keyword_only_inputs)
    ctx.options.pop("reduction", None)
    # An attribute, not saved tensors: the first backward scales the gradients in place and gives them away.
    ctx.gradients = gradients


def _with_grad_backward(
    ctx: Any, grad_value: Tensor | None, _divided_by: None, _loss: None, grad_lse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    if grad_value is None and grad_lse is None:
        return (None,) * 11
    input, linear_weight, target, lse, linear_bias, weight, divided_by, token_weight = ctx.saved_tensors
    gradients = ctx.gradients
    # Compiled autograd traces this, and replays no change of ctx: there the gradients stay as they are.
    traced = torch.compiler.is_compiling()
    if not traced:
        ctx.gradients = None
    differentiable = torch.is_grad_enabled()  # create_graph=True
    if grad_value is None:
        grad_value = lse.new_zeros(())
    if gradients is None or differentiable or grad_lse is not None:
        if differentiable:  # made again, since it depends on the logits
            head = (input, linear_weight, target, linear_bias, weight)
            options = {name: value for name, value in ctx.options.items() if name != "lse_square_scale"}
            lse = _ops.linear_cross_entropy_forward(*head, **options)[1]
        rows = (input, linear_weight, target, lse, linear_bias, weight, divided_by)
        gradients = _ops.linear_cross_entropy_backward(
            grad_value if token_weight is None else grad_value * token_weight.to(grad_value.dtype),
            grad_lse,
            *rows,
            *(None,) * 3,
            0,
            None,
            ctx.mask,
            accumulate_dtype=ctx.accumulate_dtype,
            **ctx.options,
        )
        return _of_inputs(ctx.mask, gradients, 7)
    factor = grad_value
    if input.dtype == torch.float16:
        given = as_record(ctx.options)
        loss, classes = LossOptions(given["options"], given.get("lse_square_scale", 0.0)), linear_weight.shape[0]
        later = split_divisors(input.dtype, divided_by, target, token_weight, weight, classes, loss)[1]
        assert later is not None
        factor = grad_value / later
    keep = traced or transforms.is_batch(grad_value)
    return _of_inputs(ctx.mask, given_away(gradients, factor, ctx.mask, input.dtype, keep), 7)


def given_away(
    gradients: Sequence[Tensor], factor: Tensor, wanted: Sequence[bool], dtype: torch.dtype, keep: bool
) -> list[Tensor | None]:
    """The gradients that a forward has made, times the upstream gradient: in place, unless they are kept."""
    scaled: list[Tensor | None] = []
    for gradient, want in zip(gradients, wanted, strict=True):
        if not want:
            scaled.append(None)
            continue
        if not keep and type(gradient) is Tensor:
            _ops.scale_grad_(gradient, factor)
        else:
            gradient = _ops.linear_scale_grad(gradient, factor)
        scaled.append(gradient.to(dtype))
    return scaled


def _save_backward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    *tensors, _class_start, ctx.num_classes, ctx.mask = inputs
    ctx.save_for_backward(*tensors)
    # How the chunks are made and added up is nothing to a derivative in plain torch.
    left_out = ("accumulate_dtype", *Chunking._fields)
    ctx.options = as_record({name: value for name, value in keyword_only_inputs.items() if name not in left_out})


def _second_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """By autograd through plain torch, with all logits at once."""
    if ctx.num_classes is not None:
        no_second_derivative()
    tensors = ctx.saved_tensors
    needs = [needs_grad(ctx, i) for i in range(len(tensors))]
    masked = functools.partial(reference_linear.linear_cross_entropy_backward, output_mask=ctx.mask)
    return *differentiate(masked, tensors, needs, ctx.options, grads), None, None, None


def _no_derivative(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::linear_scale_grad has no derivative, for the gradient that it scales is a constant to autograd; for a "
        "second derivative use xent_ops.cross_entropy of torch.nn.functional.linear"
    )


operator(
    "linear_cross_entropy_forward",
    check=checks.statistics,
    outputs=_statistics,
    reference=chunks.statistics,
    composed=True,
)
autograd("linear_cross_entropy_forward", _rows_backward, _save_rows)

operator(
    "linear_cross_entropy_backward",
    check=checks.backward,
    outputs=_gradients,
    reference=chunks.gradients,
    composed=True,
)
autograd("linear_cross_entropy_backward", _second_backward, _save_backward)

operator(
    "linear_cross_entropy_with_grad",
    check=checks.with_grad,
    outputs=_with_grad_outputs,
    reference=chunks.with_grad,
    composed=True,
)
autograd("linear_cross_entropy_with_grad", _with_grad_backward, _save_with_grad)

operator(
    "linear_scale_grad",
    check=scale_grad,
    outputs=lambda grad, factor: ((grad.shape, grad.dtype),),
    reference=chunks.scaled,
    composed=True,
)
autograd("linear_scale_grad", _no_derivative, save_nothing)
