"""Loss and gradient in one visit of the logits, for upstream gradients that are known in forward.

The operators have no derivative: ``xent_ops.cross_entropy(..., grad_in_forward=True)`` is their autograd.Function.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..kernels import reductions, reference
from . import checks
from .cross_entropy import statistics_of
from .library import Outputs, autograd, operator, save_nothing


def _no_derivative(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::cross_entropy_with_grad has no derivative, since it returns the gradient itself: call it below "
        "torch.no_grad(), or use xent_ops.cross_entropy(..., grad_in_forward=True)"
    )


def _outputs(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_lse_square: Tensor | None = None,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    grad_dtype: torch.dtype | None = None,
) -> Outputs:
    rows = statistics_of(logits, logits.shape[:-1], with_argmax, with_entropy)
    return (*rows, (logits.shape, grad_dtype or logits.dtype))


operator(
    "cross_entropy_with_grad",
    check=checks.index_with_grad,
    outputs=_outputs,
    reference=reference.cross_entropy_with_grad,
    check_values=checks.index_values,
    ascend=True,
)
autograd("cross_entropy_with_grad", _no_derivative, save_nothing)

operator(
    "cross_entropy_divisor",
    check=checks.index_forward,
    outputs=lambda logits, *_: (((2,), reference.accumulator(logits)),) * 2,
    reference=reductions.cross_entropy_divisor,
)

operator(
    "scale_grad_",
    check=checks.scale_grad,
    outputs=lambda *_: (),
    reference=reference.scale_grad_,
    overwrites="grad",
)
