"""Row operators for class-index targets: forward, forward with argmax, backward, backward in place.

They return one loss and one lse a row; reductions and further loss terms are plain torch (composite.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from . import checks
from .library import LOWERINGS, autograd, define, fake, kernels
from .second_order import differentiate, save_all


def _row_outputs(logits: Tensor, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.shape[:-1], dtype=dtype) for dtype in dtypes)


def _fake_forward(logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    checks.index_forward(logits, target, weight, **options)
    return _row_outputs(logits, *[reference.accumulator(logits)] * 2)


def _fake_forward_argmax(logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    return (*_fake_forward(logits, *args, **options), *_row_outputs(logits, torch.int64))


def _fake_backward(grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *args: Any, **options: Any) -> Tensor:
    checks.index_backward(grad_loss, grad_lse, logits, *args, **options)
    return logits.new_empty(logits.shape)


def _fake_backward_(*args: Any, **options: Any) -> None:
    checks.index_backward(*args, **options)


def _check_backward_(grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *args: Any, **options: Any) -> None:
    checks.without_grad("logits", logits)
    checks.index_backward(grad_loss, grad_lse, logits, *args, **options)
    checks.writable("logits", logits)


def save_rows(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    """Keep the logits, the target and one float a row: the backward makes the softmax again from the lse."""
    logits, target, weight = inputs
    if ctx.needs_input_grad[2]:
        checks.weight_needs_grad()
    ctx.set_materialize_grads(False)  # an unused lse then costs no zeros(N)
    ctx.save_for_backward(logits, target, output[1], weight)
    ctx.options = keyword_only_inputs
    if len(output) > 2:
        ctx.mark_non_differentiable(*output[2:])


def _backward(
    ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: None
) -> tuple[Tensor | None, None, None]:
    if grad_loss is None and grad_lse is None:
        return None, None, None
    logits, target, lse, weight = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(()).expand(lse.shape)
    grad = torch.ops.xent.cross_entropy_backward(grad_loss, grad_lse, logits, target, lse, weight, **ctx.options)
    return grad, None, None


def _second_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return differentiate(reference.cross_entropy_backward, ctx.saved_tensors, ctx.needs_input_grad, ctx.options, grad)


define("cross_entropy_forward")
fake("cross_entropy_forward", _fake_forward)
kernels(
    "cross_entropy_forward", checks.index_forward, reference.cross_entropy_forward, checks.index_values, ascend=True
)
autograd("cross_entropy_forward", _backward, save_rows)

define("cross_entropy_forward_argmax")
fake("cross_entropy_forward_argmax", _fake_forward_argmax)
kernels(
    "cross_entropy_forward_argmax",
    checks.index_forward,
    reference.cross_entropy_forward_argmax,
    checks.index_values,
    ascend=True,
)
autograd("cross_entropy_forward_argmax", _backward, save_rows)

BACKWARD = define("cross_entropy_backward")
fake("cross_entropy_backward", _fake_backward)
kernels("cross_entropy_backward", checks.index_backward, reference.cross_entropy_backward, ascend=True)
autograd("cross_entropy_backward", _second_backward, save_all)
LOWERINGS[BACKWARD] = reference.cross_entropy_backward

define("cross_entropy_backward_")
fake("cross_entropy_backward_", _fake_backward_)
kernels("cross_entropy_backward_", _check_backward_, reference.cross_entropy_backward_, ascend=True)
