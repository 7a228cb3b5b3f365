"""Operators of the head and the loss as one: rows, whose backward makes the logits again, and the one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...head import chunks, cross_entropy
from ...head.float16 import split_divisors
from ...kernels import reference_linear
from ...kernels.options import Chunking, LossOptions, as_record
from .. import transforms
from ..checks import divisor_needs_grad, weight_needs_grad
from ..contract import Call
from ..library import Gradients, autograd, needs_grad, operator, run, run_backward, save_for, save_nothing, saved
from ..names import RESULTS
from ..second_order import differentiate_call, no_second_derivative, save_all

_ops = torch.ops.xent

OF_HEAD = ("input", "linear_weight", "linear_bias")
# Gradients in the dtypes in which they are added up.
SUMS = {f"grad_linear_{one}": RESULTS[f"summed_{one}"] for one in ("weight", "bias")}


def mask_of(ctx: Any) -> list[bool]:
    return [needs_grad(ctx, name) for name in OF_HEAD]


def wanted(mask: Sequence[bool], gradients: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """By name."""
    return {name: grad for name, grad, want in zip(OF_HEAD, gradients, mask, strict=True) if want}


def _save_rows(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    if needs_grad(ctx, "weight"):
        weight_needs_grad()
    _loss, lse, argmax, entropy = output
    ctx.mark_non_differentiable(argmax, *(() if call.with_entropy else (entropy,)))
    save_for(ctx, "linear_cross_entropy_backward", call, lse=lse, entropy=entropy if call.with_entropy else None)


def _rows_backward(ctx: Any, grad_loss: Any, grad_lse: Any, _: None, grad_entropy: Any) -> Gradients:
    mask = mask_of(ctx)
    return wanted(mask, run_backward(ctx, grad_loss, grad_lse=grad_lse, grad_entropy=grad_entropy, output_mask=mask))


def _save_with_grad(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    ctx.mask = [bool(made and needed) for made, needed in zip(call.output_mask, mask_of(ctx), strict=True)]
    if needs_grad(ctx, "weight"):
        weight_needs_grad()
    if needs_grad(ctx, "divisor"):
        divisor_needs_grad()
    _value, divisors, row_loss, lse, argmax, entropy, *gradients = output
    ctx.mark_non_differentiable(divisors, row_loss, argmax, entropy, *gradients)
    made = {"lse": lse, "divisors": divisors, "entropy": None}
    save_for(ctx, "linear_cross_entropy_backward", call, "token_weight", **made)
    # An attribute, not saved tensors: the first backward scales the gradients in place and gives them away.
    ctx.gradients = gradients


def _with_grad_backward(ctx: Any, grad_value: Any, _divisors: None, _loss: None, grad_lse: Any, *_: None) -> Gradients:
    given, gradients = saved(ctx), ctx.gradients
    # Compiled autograd traces this, and replays no change of ctx: there the gradients stay as they are.
    traced = torch.compiler.is_compiling()
    if not traced:
        ctx.gradients = None
    differentiable = torch.is_grad_enabled()  # create_graph=True
    if grad_value is None:
        grad_value = given["lse"].new_zeros(())
    if gradients is None or differentiable or grad_lse is not None:
        made = {"output_mask": ctx.mask, "grad_lse": grad_lse}
        if differentiable:  # made again, since it depends on the logits
            made["lse"] = run("linear_cross_entropy_forward", given)[1]
        if given["token_weight"] is not None:
            grad_value = grad_value * given["token_weight"].to(grad_value.dtype)
        return wanted(ctx.mask, run_backward(ctx, grad_value, **made))
    factor = grad_value
    if given["input"].dtype == torch.float16:
        later = split_divisors(
            given["input"].dtype,
            divisors=given["divisors"],
            target=given["target"],
            token_weight=given["token_weight"],
            weight=given["weight"],
            classes=given["linear_weight"].shape[0],
            loss=LossOptions(as_record(given)["options"], given["lse_square_scale"]),
        )[1]
        assert later is not None
        factor = grad_value / later
    keep = traced or transforms.is_batch(grad_value)
    return wanted(ctx.mask, given_away(gradients, factor, ctx.mask, given["input"].dtype, keep))


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


def _second_backward(ctx: Any, *grads: Tensor) -> Gradients:
    """By autograd through plain torch, with all logits at once."""
    if ctx.rest["num_classes"] is not None:
        no_second_derivative()
    # How the chunks are made and added up is nothing to a derivative in plain torch.
    left_out = ("accumulate_dtype", *Chunking._fields)
    return differentiate_call(reference_linear.linear_cross_entropy_backward, ctx, grads, left_out)


def _no_derivative(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::linear_scale_grad has no derivative, for the gradient that it scales is a constant to autograd; for a "
        "second derivative use xent_ops.cross_entropy of torch.nn.functional.linear"
    )


operator("linear_cross_entropy_forward", reference=cross_entropy.statistics, composed=True)
autograd("linear_cross_entropy_forward", _rows_backward, _save_rows)

operator(
    "linear_cross_entropy_backward",
    reference=cross_entropy.gradients,
    composed=True,
)
autograd("linear_cross_entropy_backward", _second_backward, save_all)

operator("linear_cross_entropy_with_grad", reference=cross_entropy.with_grad, results=SUMS, composed=True)
autograd("linear_cross_entropy_with_grad", _with_grad_backward, _save_with_grad)

operator(
    "linear_scale_grad",
    reference=chunks.scaled,
    results={"scaled": ("=grad", "... columns", "")},
    composed=True,
)
autograd("linear_scale_grad", _no_derivative, save_nothing)
