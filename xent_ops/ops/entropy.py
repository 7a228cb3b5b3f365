"""Row operators that also give the entropy of the softmax, for reinforcement-learning losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.options import DEFAULTS, Options
from . import checks
from .cross_entropy import rows
from .library import autograd, needs_grad, operator
from .second_order import differentiate, save_all


def _check_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
) -> None:
    checks.index_forward(logits, target, weight, options=options)
    checks.rows_of(logits, grad_loss=grad_loss, grad_lse=grad_lse, lse=lse, grad_entropy=grad_entropy, entropy=entropy)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    logits, target, weight = inputs
    if needs_grad(ctx, 2):
        checks.weight_needs_grad()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, output[1], output[2], weight)
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None) -> tuple:
    if grad_loss is None and grad_lse is None and grad_entropy is None:
        return None, None, None
    logits, target, lse, entropy, weight = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(()).expand(lse.shape)
    grad = torch.ops.xent.cross_entropy_backward_entropy(
        grad_loss, grad_lse, grad_entropy, logits, target, lse, entropy, weight, **ctx.options
    )
    return grad, None, None


def _second_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return differentiate(
        reference.cross_entropy_backward_entropy, ctx.saved_tensors, ctx.needs_input_grad, ctx.options, grad
    )


operator(
    "cross_entropy_forward_entropy",
    check=checks.index_forward,
    outputs=lambda logits, *_: (*rows(logits), *rows(logits)[:1]),
    reference=reference.cross_entropy_forward_entropy,
    check_values=checks.index_values,
    ascend=True,
)
autograd("cross_entropy_forward_entropy", _backward, _setup_context)

operator(
    "cross_entropy_backward_entropy",
    check=_check_backward,
    outputs=lambda grad_loss, grad_lse, grad_entropy, logits, *_: ((logits.shape, logits.dtype),),
    reference=reference.cross_entropy_backward_entropy,
    ascend=True,
)
autograd("cross_entropy_backward_entropy", _second_backward, save_all)
