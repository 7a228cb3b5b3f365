"""Loss and gradient in one visit of the logits, for upstream gradients that are known in forward.

The operators have no derivative: ``xent_ops.cross_entropy(..., grad_in_forward=True)`` is their autograd.Function.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ..kernels import reference
from . import checks
from .library import autograd, define, fake, kernels, save_nothing


def _fake_with_grad_(logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    checks.index_with_grad(logits, *args, **options)
    shape, dtype = logits.shape[:-1], reference.accumulator(logits)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=dtype)


def _fake_with_grad(logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (*_fake_with_grad_(logits, *args, **options), logits.new_empty(logits.shape))


def _check_with_grad_(logits: Tensor, *args: Any, **options: Any) -> None:
    checks.without_grad("logits", logits)
    checks.index_with_grad(logits, *args, **options)
    checks.writable("logits", logits)


def _check_scale(grad: Tensor, factor: Tensor) -> None:
    checks.without_grad("grad", grad)
    checks.scale_grad(grad, factor)
    checks.writable("grad", grad)


def _check_values(
    logits: Tensor, target: Tensor, *args: Tensor | None, ignore_index: int = -100, **options: Any
) -> None:
    checks.check_targets(target, logits.shape[-1], ignore_index)


def _no_derivative(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::cross_entropy_with_grad has no derivative, since it returns the gradient itself: call it below "
        "torch.no_grad(), or use xent_ops.cross_entropy(..., grad_in_forward=True)"
    )


define("cross_entropy_with_grad")
fake("cross_entropy_with_grad", _fake_with_grad)
kernels(
    "cross_entropy_with_grad",
    checks.index_with_grad,
    reference.cross_entropy_with_grad,
    _check_values,
    module="launch_one_pass",
)
autograd("cross_entropy_with_grad", _no_derivative, save_nothing)

define("cross_entropy_with_grad_")
fake("cross_entropy_with_grad_", _fake_with_grad_)
kernels(
    "cross_entropy_with_grad_",
    _check_with_grad_,
    reference.cross_entropy_with_grad_,
    _check_values,
    module="launch_one_pass",
)

define("scale_grad_")
fake("scale_grad_", checks.scale_grad)
kernels("scale_grad_", _check_scale, reference.scale_grad_, module="launch_one_pass")
