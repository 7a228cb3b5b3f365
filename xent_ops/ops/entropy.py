"""Row operators that also give the entropy of the softmax, for reinforcement-learning losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from . import checks
from .library import LOWERINGS, autograd, define, fake, kernels
from .second_order import differentiate, save_all


def _fake_forward(logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    checks.index_forward(logits, target, weight, **options)
    dtype = reference.accumulator(logits)
    return tuple(logits.new_empty(logits.shape[:-1], dtype=dtype) for _ in range(3))


def _check_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    weight: Tensor | None = None,
    **options: Any,
) -> None:
    checks.index_backward(grad_loss, grad_lse, logits, target, lse, weight, **options)
    checks.rows_of(logits, grad_entropy=grad_entropy, entropy=entropy)


def _fake_backward(*args: Any, **options: Any) -> Tensor:
    _check_backward(*args, **options)
    return args[3].new_empty(args[3].shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    logits, target, weight = inputs
    if ctx.needs_input_grad[2]:
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


define("cross_entropy_forward_entropy")
fake("cross_entropy_forward_entropy", _fake_forward)
kernels(
    "cross_entropy_forward_entropy",
    checks.index_forward,
    reference.cross_entropy_forward_entropy,
    checks.index_values,
    ascend=True,
)
autograd("cross_entropy_forward_entropy", _backward, _setup_context)

BACKWARD = define("cross_entropy_backward_entropy")
fake("cross_entropy_backward_entropy", _fake_backward)
kernels("cross_entropy_backward_entropy", _check_backward, reference.cross_entropy_backward_entropy, ascend=True)
autograd("cross_entropy_backward_entropy", _second_backward, save_all)
LOWERINGS[BACKWARD] = reference.cross_entropy_backward_entropy
