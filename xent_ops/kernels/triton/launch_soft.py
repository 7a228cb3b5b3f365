"""Launchers of the operators for class probabilities; see launch.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..options import DEFAULTS, RowOptions
from ..reference import accumulator
from ..rows import class_weight, dense_like, per_row_like
from ..sizes import size_hint
from . import configs
from .cached import Launch
from .common import Run, launcher, new_gradient, new_rows, row_layout
from .flags import flags_of
from .soft import soft_backward_kernel, soft_forward_kernel


def _constants(logits: Tensor, options: RowOptions, weighted: bool, grad_lse: bool) -> dict[str, Any]:
    config = configs.soft(logits.shape[-1], logits.element_size())
    flags = flags_of(options, weighted, logits.element_size())
    return {
        "FLAGS": flags._replace(smoothing=False, grad_lse=grad_lse),  # probabilities are smoothed by any factor
        "BLOCK": config.block,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


@launcher
def soft_cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    check_target: bool = True,
    *,
    options: RowOptions = DEFAULTS,
) -> Run:
    (number, strides, as_rows), (_, target_strides, as_targets) = row_layout(logits), row_layout(target)
    empty = size_hint(number) == 0
    launch = Launch(
        soft_forward_kernel,
        number,
        logits.shape[-1],
        *strides,
        *target_strides,
        *options.kernel_arguments()[1:],
        **_constants(logits, options, weight is not None, False),
    )
    new_row = new_rows(logits)

    def run(logits: Tensor, target: Tensor, weight: Tensor | None = None, *_: Any) -> tuple[Tensor, Tensor]:
        loss, lse = new_row(), new_row()
        if not empty:
            launch(as_rows(logits), as_targets(target), class_weight(weight, lse), loss, lse)
        return loss, lse

    return run


@launcher
def soft_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> Run:
    (number, strides, as_rows), (_, target_strides, as_targets) = row_layout(logits), row_layout(target)
    empty = size_hint(number) == 0
    as_grad_loss, grad_loss_stride = per_row_like(grad_loss)
    as_grad_lse, grad_lse_stride = per_row_like(grad_lse)
    launch = Launch(
        soft_backward_kernel,
        number,
        logits.shape[-1],
        *strides,
        *target_strides,
        grad_loss_stride,
        grad_lse_stride,
        *options.kernel_arguments()[1:],
        **_constants(logits, options, weight is not None, grad_lse is not None),
    )
    gradient = new_gradient(logits)
    as_lse = dense_like(lse, accumulator(logits))  # the kernel computes in this dtype

    def run(
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        weight: Tensor | None = None,
    ) -> Tensor:
        grad = gradient()
        if not empty:
            lse = as_lse(lse)
            launch(
                as_grad_loss(grad_loss),
                lse if grad_lse is None else as_grad_lse(grad_lse),
                as_rows(logits),
                as_targets(target),
                lse,
                class_weight(weight, lse),
                grad,
            )
        return grad

    return run
