"""Loss and gradient in one pass over the logits, for upstream gradients that are known in the forward.

The operators have no derivative. ``xent_ops.cross_entropy(..., grad_in_forward=True)`` is their autograd.Function.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ..kernels import reference_with_grad
from .library import autograd, operator, save_nothing
from .rules import check_targets


def _no_derivative(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::cross_entropy_with_grad has no derivative, since it returns the gradient itself: call it under "
        "torch.no_grad(), or use xent_ops.cross_entropy(..., grad_in_forward=True)"
    )


operator(
    "cross_entropy_with_grad",
    reference=reference_with_grad.cross_entropy_with_grad,
    check_values=check_targets,
    ascend=True,
)
autograd("cross_entropy_with_grad", _no_derivative, save_nothing)

operator("scale_grad_", reference=reference_with_grad.scale_grad_, overwrites="grad")
