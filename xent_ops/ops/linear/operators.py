"""Operators for the head and the loss: rows, whose backward computes the logits again, and loss with gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...head import chunks, cross_entropy
from ...head.float16 import Split, split_loss
from ...kernels import reference_linear
from ...kernels.options import Chunking, LossOptions, as_record
from ...kernels.reductions import counted_weights
from ...kernels.reference import is_counted
from .. import transforms
from ..contract import Call
from ..cross_entropy import save_rows
from ..dtensors import is_dtensor
from ..formulas import GradientsByName, autograd, needs_grad, run, run_backward, save_for, saved
from ..library import operator
from ..names import RESULTS
from ..rules import check_targets
from ..second_order import differentiate_call, no_second_derivative, save_all, without_derivative

_ops = torch.ops.xent

HEAD_NAMES = ("input", "linear_weight", "linear_bias")
# Gradients in the dtypes of their sums.
SUMS = {f"grad_linear_{one}": RESULTS[f"summed_{one}"] for one in ("weight", "bias")}


def mask_of(ctx: Any) -> list[bool]:
    return [needs_grad(ctx, name) for name in HEAD_NAMES]


def by_name(mask: Sequence[bool], gradients: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """The gradients that the mask selects, by name."""
    return {name: grad for name, grad, is_wanted in zip(HEAD_NAMES, gradients, mask, strict=True) if is_wanted}


def _rows_backward(ctx: Any, grad_loss: Any, grad_lse: Any, _: None, grad_entropy: Any, *grads: Any) -> GradientsByName:
    mask, (_low, grad_ids) = mask_of(ctx), grads
    updates = {"grad_lse": grad_lse, "grad_entropy": grad_entropy, "grad_ids": grad_ids}
    return by_name(mask, run_backward(ctx, grad_loss, **updates, output_mask=mask))


def _check_ids(call: Call) -> None:
    if call.ids is not None:  # the row operators check targets
        check_targets(call)


def _save_with_grad(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    _value, divisors, z_loss, accuracy, row_loss, lse, argmax, entropy, *gradients = output
    ctx.mark_non_differentiable(divisors, z_loss, accuracy, row_loss, argmax, entropy, *gradients)
    results = {"lse": lse, "divisors": divisors, "entropy": None}
    save_for(ctx, "linear_cross_entropy_backward", call, "token_weight", **results)
    loss = LossOptions(as_record(call._asdict())["options"], call.lse_square_scale)
    split = split_loss(call.input.dtype, divisors, call.target, call.token_weight, call.weight, loss)
    keep_gradients(ctx, call, gradients, split)


def _with_grad_backward(ctx: Any, grad_value: Any, *grads: Any) -> GradientsByName:
    _divisors, _z_loss, _accuracy, _loss, grad_lse, *_ = grads
    traced, differentiable = torch.compiler.is_compiling(), torch.is_grad_enabled()  # create_graph=True
    _ = ctx.saved_tensors  # raises if one was written to, although the gradients do not depend on them any more
    if grad_value is not None and ctx.gradients is not None and not differentiable and grad_lse is None:
        return give_away(ctx, grad_value, keep=traced or transforms.is_batch(grad_value))
    values = saved(ctx)
    if grad_value is None:
        grad_value = values["lse"].new_zeros(())
    if not traced:  # a second backward computes them again
        ctx.gradients = None
    if grad_lse is not None:  # ignored rows have a constant, infinite lse: a gradient of it may be NaN
        grad_lse = torch.where(is_counted(values["target"], values["ignore_index"]), grad_lse, 0.0)
    updates = {"output_mask": ctx.mask, "grad_lse": grad_lse}
    if differentiable:  # recomputed, because it depends on the logits
        _, updates["lse"], _, _, updates["lse_low"], _ = run("linear_cross_entropy_forward", values)
    token_weight, row_args = values["token_weight"], (values["target"], values["ignore_index"], grad_value.dtype)
    if token_weight is not None:
        grad_value = grad_value * counted_weights(token_weight, *row_args)
    return by_name(ctx.mask, run_backward(ctx, grad_value, **updates))


# Gradients from the forward are an attribute of ctx, not saved tensors: the first backward scales them in place and
# returns them.


def keep_gradients(ctx: Any, call: Call, gradients: Sequence[Tensor], split: Split) -> None:
    """``split`` has the factors that the gradients lack."""
    output_mask = getattr(call, "output_mask", (True, True, True))
    ctx.mask = [bool(is_made and needed) for is_made, needed in zip(output_mask, mask_of(ctx), strict=True)]
    ctx.dtype, ctx.gradients, ctx.divisor, ctx.row_factors = call.input.dtype, gradients, split.divisor, split.rows


def give_away_once(ctx: Any, grad: Tensor) -> GradientsByName:
    """The gradients times the loss's upstream gradient (). A later backward raises, unless the graph was retained."""
    if ctx.gradients is None:
        raise RuntimeError(
            "the gradients of this loss were given away by its first backward, which did not ask for retain_graph=True"
        )
    # Compiled autograd traces this and replays no change of ctx, so there ctx keeps the gradients.
    return give_away(
        ctx, grad, keep=torch.compiler.is_compiling() or transforms.is_batch(grad) or transforms.keep_graph()
    )


def give_away(ctx: Any, grad: Tensor, keep: bool) -> GradientsByName:
    gradients, all_rows = ctx.gradients, grad if ctx.divisor is None else grad / ctx.divisor
    factors = (all_rows if ctx.row_factors is None else grad * ctx.row_factors, all_rows, all_rows)
    if not keep:
        ctx.gradients = None
    # A tracer must not record a write: functionalization would hide it from xent_ops.decompositions.
    keep = keep or transforms.is_recorded()
    scaled: list[Tensor | None] = []
    for gradient, factor, is_wanted in zip(gradients, factors, ctx.mask, strict=True):
        if not is_wanted:
            scaled.append(None)
            continue
        if not keep and (type(gradient) is Tensor or is_dtensor(gradient)):
            _ops.scale_grad_(gradient, factor)
        else:
            gradient = _ops.linear_scale_grad(gradient, factor)
        scaled.append(gradient if gradient.dtype == ctx.dtype else gradient.to(ctx.dtype))
    return by_name(ctx.mask, scaled)


def _second_backward(ctx: Any, *grads: Tensor) -> GradientsByName:
    """Autograd through plain torch, with all logits at once."""
    if ctx.options["num_classes"] is not None or "ids" in ctx.names:
        no_second_derivative()
    # Plain torch has no chunks and no ids.
    left_out = ("accumulate_dtype", "ids", "at_ids", "grad_ids", "mask_ids", *Chunking._fields)
    return differentiate_call(reference_linear.linear_cross_entropy_backward, ctx, grads, left_out)


_forward = cross_entropy.linear_cross_entropy_forward
operator("linear_cross_entropy_forward", _forward, check_values=_check_ids, calls_operators=True)
_save_rows = functools.partial(save_rows, "linear_cross_entropy_backward")
autograd("linear_cross_entropy_forward", _rows_backward, _save_rows, constants=("weight",))

operator("linear_cross_entropy_backward", cross_entropy.linear_cross_entropy_backward, calls_operators=True)
autograd("linear_cross_entropy_backward", _second_backward, save_all)

operator(
    "linear_cross_entropy_with_grad",
    cross_entropy.linear_cross_entropy_with_grad,
    results=SUMS,
    calls_operators=True,
)
_constants = ("weight", "divisor")
autograd("linear_cross_entropy_with_grad", _with_grad_backward, _save_with_grad, constants=_constants)

operator(
    "linear_scale_grad",
    chunks.linear_scale_grad,
    results={"scaled": ("=grad", "... columns", "")},
    calls_operators=True,
)
without_derivative(
    "linear_scale_grad",
    ", for the gradient that it scales is a constant to autograd; for a second derivative use xent_ops.cross_entropy "
    "of torch.nn.functional.linear",
)
