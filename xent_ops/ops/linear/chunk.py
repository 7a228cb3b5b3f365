"""Operators of one chunk of rows of a head, or of a rank's slice of one, between which the caller's code stands.

The loop is head/loop.py's. The logits of a chunk live from the first operator to the third::

    linear_cross_entropy_chunk        a chunk's logits and their statistics: (loss, lse), with entropies (loss, lse,
                                      entropy), (2, n) or (3, n); of a slice what cross_entropy_shard returns; after
                                      them x of the ids, (K, n)
    linear_cross_entropy_chunk_grad_  from the coefficients of rows: the gradient, written over the logits, and the
                                      input's gradient, of a slice this rank's part of it
    linear_cross_entropy_chunk_add_   the chunk's part of the weight's and the bias' gradient
    attach_gradients                  the loss, whose derivatives are the gradients made
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...head import shard
from ...head.sizes import padded_classes
from .. import checks
from ..contract import Call, handed_over
from ..library import Gradients, autograd, operator
from ..rules import check_targets
from ..second_order import no_second_derivative
from .operators import OF_HEAD, give_away_once, keep_gradients

# Of the logits that the first operator makes, whose columns are padded.
PADDED = {
    "logits": ("float", "... P", "as linear_cross_entropy_chunk makes them"),
    "linear_weight": ("float", "V H", "one row of features for each class"),
}
GRAD_INPUT = {"grad_input": ("=linear_weight", "... H", "with_grad_input")}


def one_chunk(call: Call) -> None:
    if call.input.dim() != 2:
        raise ValueError(f"input has shape {tuple(call.input.shape)}; expected (rows, H), the rows of one chunk")


def _stats(call: Call) -> tuple[int, ...]:
    if call.num_classes is not None:
        return 1, handed_over(call)
    places = 0 if call.ids is None else call.ids.shape[1]
    return (3 if call.with_entropy else 2) + places, call.target.shape[0]


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
) -> Tensor:
    return value.clone()


def _check_gradients(call: Call) -> None:
    for name in OF_HEAD:
        tensor, made = getattr(call, name), getattr(call, f"grad_{name}")
        wanted = made.dim() != 1 or made.shape[0] != 0  # one size at a time: that of rows may depend on data
        if tensor is not None and made.dim() == tensor.dim() and wanted:
            checks.same_shape(f"grad_{name}", made.shape, tensor.shape, f"the gradient of {name}")


def _save_gradients(ctx: Any, call: Call, output: Tensor) -> None:
    keep_gradients(ctx, call, [getattr(call, f"grad_{name}") for name in OF_HEAD], call.divisor)


def _attached_backward(ctx: Any, grad: Tensor) -> Gradients:
    if torch.is_grad_enabled():  # create_graph=True
        no_second_derivative()
    return give_away_once(ctx, grad)


operator(
    "linear_cross_entropy_chunk",
    reference=shard.chunk,
    check_values=check_targets,
    results={"stats": ("acc", _stats, "")},
    rules=(one_chunk,),
    composed=True,
)
operator(
    "linear_cross_entropy_chunk_grad_",
    reference=shard.chunk_grad_,
    arguments=PADDED,
    results=GRAD_INPUT,
    composed=True,
    overwrites="logits",
)
operator(
    "linear_cross_entropy_chunk_add_",
    reference=shard.chunk_add_,
    arguments={"grad_logits": None},
    rules=(one_chunk, _check_add),
    composed=True,
    overwrites="grad_linear_weight",
)
operator(
    "attach_gradients",
    reference=_attached,
    arguments={
        "linear_weight": ("=input", "columns H", "one row of the input's features for each class"),  # may have none
        "linear_bias": ("=input", "columns", "one number a class"),
        "divisor": None,
    },
    results={"loss": ("=value", lambda call: call.value.shape, "")},
    rules=(_check_gradients,),
    composed=True,
)
autograd("attach_gradients", _attached_backward, _save_gradients)
