"""Operators for one chunk of rows of a head, or of a rank's slice of it. The caller's code runs between them.

head/loop.py has the loop. The logits of a chunk live from the first operator to the third::

    linear_logits                     a chunk's logits
    (row operators                    their statistics; from upstream gradients the gradient, written over the logits)
    linear_grad_input                 the input's gradient; for a slice, this rank's part of it
    linear_cross_entropy_chunk_add_   adds the chunk's part of the weight's and the bias' gradient
    attach_gradients                  the loss, whose derivatives are these gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...head import chunk
from ...head.float16 import Split
from ...head.loop import HeadSlice
from ...kernels.rows import padded_classes
from .. import checks
from ..contract import Call
from ..formulas import GradientsByName, autograd, differentiable
from ..library import operator
from ..second_order import no_second_derivative
from .operators import HEAD_NAMES, give_away_once, keep_gradients

_HEAD = ("columns H", "one row of features for each class")  # may be empty
_OF_LOGITS = {"linear_weight": ("=input", *_HEAD), "linear_bias": ("=input", "columns", "one number a class")}
_OF_GRADIENT = {"logits": ("float", "... P", "as linear_logits makes them"), "linear_weight": ("float", *_HEAD)}


def _one_chunk(call: Call) -> None:
    if call.primary.dim() != 2:
        name, columns = ("input", "H") if hasattr(call, "input") else ("logits", "columns")
        shape = tuple(call.primary.shape)
        raise ValueError(f"{name} has shape {shape}; expected (rows, {columns}), the rows of one chunk")


def _check_add(call: Call) -> None:
    grad = call.grad_logits
    checks.same_shape("grad_logits", grad.shape[:1], call.input.shape[:1], "as many rows as the input")
    checks.check_value(
        padded_classes(call.columns, grad.dtype) == grad.shape[1],
        lambda: f"grad_logits has shape {tuple(grad.shape)}, which {call.columns} classes do not have",
    )


def _attached(
    value: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    grad_input: Tensor,
    grad_linear_weight: Tensor,
    grad_linear_bias: Tensor,
    divisor: Tensor | None = None,
    row_factors: Tensor | None = None,
) -> Tensor:
    return value.clone()


def _check_gradients(call: Call) -> None:
    for name in HEAD_NAMES:
        tensor, gradient = getattr(call, name), getattr(call, f"grad_{name}")
        is_given = gradient.dim() != 1 or gradient.shape[0] != 0  # one size at a time: rows may depend on data
        if tensor is not None and gradient.dim() == tensor.dim() and is_given:
            checks.same_shape(f"grad_{name}", gradient.shape, tensor.shape, f"the gradient of {name}")


def _save_gradients(ctx: Any, call: Call, output: Tensor) -> None:
    gradients = [getattr(call, f"grad_{name}") for name in HEAD_NAMES]
    keep_gradients(ctx, call, gradients, Split(call.value, None, call.divisor, call.row_factors))


def _attached_backward(ctx: Any, grad: Tensor) -> GradientsByName:
    if torch.is_grad_enabled():  # create_graph=True
        no_second_derivative()
    return give_away_once(ctx, grad)


operator("linear_logits", chunk.linear_logits, arguments=_OF_LOGITS, rules=(_one_chunk,), calls_operators=True)
operator(
    "linear_grad_input",
    chunk.linear_grad_input,
    arguments=_OF_GRADIENT,
    results={"grad_input": ("=linear_weight", "... H", "with_grad_input")},
    rules=(_one_chunk,),
    calls_operators=True,
)
operator(
    "linear_cross_entropy_chunk_add_",
    chunk.linear_cross_entropy_chunk_add_,
    arguments={"grad_logits": None},
    rules=(_one_chunk, _check_add),
    calls_operators=True,
    overwrites="grad_linear_weight",
)
operator(
    "attach_gradients",
    _attached,
    arguments={
        "linear_weight": ("=input", "columns H", "one row of the input's features for each class"),  # may be empty
        "linear_bias": ("=input", "columns", "one number a class"),
        "divisor": None,
    },
    results={"loss": ("=value", lambda call: call.value.shape, "")},
    rules=(_check_gradients,),
    calls_operators=True,
)
autograd("attach_gradients", _attached_backward, _save_gradients)


def with_gradients(
    value: Tensor,
    input: Tensor,
    head: HeadSlice,
    gradients: Sequence[Tensor],
    split: Split,  # has the factors that the gradients lack
    part: int | None = None,  # the input has this part of the rows
) -> Tensor:
    """The loss. Its derivatives are these gradients of the input, the weight and the bias."""
    rows = split.rows if split.rows is None or part is None else split.rows[part]
    gradient_args = (input, head.weight, head.bias, *gradients, split.divisor, rows)
    return differentiable("attach_gradients", value, *gradient_args)
