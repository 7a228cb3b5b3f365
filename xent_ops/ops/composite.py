"""``torch.ops.xent.cross_entropy``: the reduced operator, or the row operator with a z-loss.

It is composite (CompositeImplicitAutograd): autograd and every tracer see its parts, torch.export sees one node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.options import RowOptions
from ..kernels.reductions import reduce_rows
from . import arguments, checks, transforms
from .library import LIBRARY, define


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    arguments.tensors(logits, target, weight, "logits")
    loss = arguments.loss_options(*RowOptions(**options), lse_square_scale, reduction, logits.dtype)
    checks.constant("weight", weight)
    if transforms.forward_mode():  # operators drop tangents
        transforms.refuse("torch.ops.xent.cross_entropy")
    # Options are passed unchanged: comparing them with defaults would specialise a symbolic option.
    if reduction != "none":
        return torch.ops.xent.cross_entropy_reduced(
            logits, target, weight, lse_square_scale=lse_square_scale, reduction=reduction, **options
        )[0]
    row_loss, lse, *_ = torch.ops.xent.cross_entropy_forward(logits, target, weight, **options)
    return reduce_rows(row_loss, lse, target, None, loss).value


define("cross_entropy")
LIBRARY.impl("cross_entropy", cross_entropy, "CompositeImplicitAutograd")
