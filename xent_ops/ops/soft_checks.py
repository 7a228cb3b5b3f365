"""What no loss of class probabilities can take: see checks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.options import DEFAULTS, Options
from ..kernels.reference import accumulator
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
    if check_target:
        refuse_log_probabilities("target of class probabilities", target, accumulator(logits))


def refuse_log_probabilities(name: str, values: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Probabilities, or what was passed by mistake? A row of log-probabilities adds up to less than 0."""
    negative = values.sum(-1) < 0
    if bool(negative.any()):
        least, variable = values[negative].min().to(dtype), name.split()[0]
        raise ValueError(
            f"{name} has {float(least)} in a row that adds up to less than 0: "
            f"pass {variable}.exp() of log-probabilities, {variable}.softmax(dim) of logits"
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
