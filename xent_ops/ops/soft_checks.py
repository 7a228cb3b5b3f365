"""What no loss of class probabilities can take: see checks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.options import DEFAULTS, Options
from . import checks


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    check_target: bool = True,
    *,
    options: Options = DEFAULTS,
) -> None:
    checks.floating_logits(logits)
    checks.dtype("target of class probabilities", target, checks.FLOATS)
    checks.same_shape("target", target.shape, logits.shape, "one probability for each logit")
    checks.same_device("target", target, logits)
    checks.row_options(weight, logits, options)


def values(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, check_target: bool = True, **_options: Any
) -> None:
    """Probabilities, or what was passed by mistake? A row of log-probabilities adds up to less than 0."""
    if not check_target:
        return
    negative = target.sum(-1) < 0
    if bool(negative.any()):
        least = target[negative].min().to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        raise ValueError(
            f"target of class probabilities has {float(least)} in a row that adds up to less than 0: "
            "pass target.exp() of log-probabilities, target.softmax(dim) of logits"
        )


def backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
) -> None:
    forward(logits, target, weight, options=options)
    checks.rows_of(logits, grad_loss=grad_loss, grad_lse=grad_lse, lse=lse)
