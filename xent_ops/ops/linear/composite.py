"""``torch.ops.xent.linear_cross_entropy``: one operator if a reduced loss needs gradients, else the rows' operator.

It is composite: the choice is made when the call is traced or runs, so a graph for inference or export has one product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._private import private
from ...kernels.options import Chunking, LossOptions, RowOptions
from .. import arguments, checks, transforms
from ..dtensors import is_dtensor, takes_rows
from ..formulas import differentiable
from ..library import LIBRARY, define
from ..reduction import summary

_tracing_context = private(
    "torch._guards.TracingContext.try_get", lambda: None, "a compiled selective checkpoint takes four products"
)


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors, in autocast's dtype if it is on, as nn.Linear casts them."""
    device = next(tensor for tensor in tensors if tensor is not None).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # autocast refuses meta
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype)
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    )


def forward_runs_twice() -> bool:
    """Inside saved-tensor hooks? An eager checkpoint uses them, and there one product is better than three."""
    # torch 2.11 implements a compiled selective checkpoint with hooks too. Only its context shows that it is traced.
    traced = transforms.is_traced() or _tracing_context() is not None
    return not traced and transforms.in_saved_tensors_hooks()


def gradients_in_forward(*tensors: Tensor | None) -> bool:
    """Does the forward compute the gradients of a reduced loss? These tensors are input, weight and bias."""
    wants_grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return wants_grad and not forward_runs_twice() and not transforms.is_jit_traced()


def head_with_grad(
    head: tuple[Any, ...], divisor: Tensor | None, token_weight: Tensor | None, /, *other_args: Any, **keywords: Any
) -> tuple[Tensor, ...]:
    """``linear_cross_entropy_with_grad``, with a mask from the head."""
    input, linear_weight, _, linear_bias, _ = head
    mask = [tensor is not None and tensor.requires_grad for tensor in (input, linear_weight, linear_bias)]
    return differentiable("linear_cross_entropy_with_grad", *head, divisor, token_weight, mask, *other_args, **keywords)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    token_weight: Tensor | None = None,
    *,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: str | None = None,
    batch_invariant: bool = False,
    **options: Any,
) -> Tensor:
    arguments.linear(input, linear_weight, target, linear_bias, weight, divisor)
    loss = arguments.loss_options(*RowOptions(**options), lse_square_scale, reduction, input.dtype)
    checks.constant("weight", weight)
    arguments.divisor(divisor, input, reduction)
    checks.token_weight(token_weight, target)
    transforms.refuse("torch.ops.xent.linear_cross_entropy")
    chunking = Chunking(chunk_rows, skip_ignored, logits_dtype, products, batch_invariant).keywords()
    head = (input, linear_weight, target, linear_bias, weight)
    return loss_of_head(*head, divisor, token_weight, accumulate_dtype, chunking, loss)


def loss_of_head(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    divisor: Tensor | None,
    token_weight: Tensor | None,
    accumulate_dtype: torch.dtype | None,
    chunking: dict[str, Any],
    loss: LossOptions,
) -> Tensor:
    """The loss of arguments that are checked."""
    input, linear_weight, linear_bias = cast_for_autocast(input, linear_weight, linear_bias)
    head = (input, linear_weight, target, linear_bias, weight)
    by_rows = is_dtensor(input) and takes_rows(input.dtype, chunking["skip_ignored"], chunking["products"])
    if loss.reduction != "none" and not by_rows and gradients_in_forward(input, linear_weight, linear_bias):
        return head_with_grad(head, divisor, token_weight, accumulate_dtype, **chunking, **loss.keywords())[0]
    options = loss.row_options.keywords()
    options |= {"accumulate_dtype": accumulate_dtype, **chunking}
    rows = differentiable("linear_cross_entropy_forward", *head, **options)
    row_loss, lse = rows[:2]
    return summary(row_loss, lse, target, weight, token_weight, divisor, loss)[0]


define("linear_cross_entropy")
LIBRARY.impl("linear_cross_entropy", linear_cross_entropy, "CompositeImplicitAutograd")
