"""``cross_entropy``: from the user's shapes to the operators' (..., V)."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import checks


def _classes_last(input: Tensor, dim: int) -> Tensor:
    if input.dim() == 0:
        raise ValueError("input has no dimension; expected (C,), (N, C) or (N, C, d1, ...)")
    if input.dim() == 1:
        dim = 0 if dim in (1, 0) else dim
    if not -input.dim() <= dim < input.dim():
        raise ValueError(f"dim={dim} is not a dimension of input with shape {tuple(input.shape)}")
    return input.movedim(dim, -1)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    dim: int = 1,
) -> Tensor:
    logits = _classes_last(input, dim)
    checks.reduction(reduction)
    return torch.ops.xent.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
    )
