"""A loss over a split vocabulary as one autograd node, for eager training. The pattern is that of ops/function.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import reductions, reference
from ..kernels.options import LossOptions, as_record
from ..ops import transforms
from ..ops.library import below_autograd
from .groups import Ranks
from .parts import all_gather_shard_stats

_ops = torch.ops.xent


def loss_and_saved(
    logits: Tensor,  # (..., columns of this rank)
    target: Tensor,  # (...)
    weight: Tensor | None,  # (columns of this rank,)
    ranks: Ranks,
    shard_range: tuple[int, int],  # class_start, num_classes
    loss: LossOptions,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss, and the tensors that ``gradient`` takes: cross_entropy_backward's after its gradients, and lse_low."""
    gathered = all_gather_shard_stats(logits, target, weight, ranks, shard_range, loss.row_options)
    arguments = (logits, target, gathered, *shard_range, weight)
    divisor = None
    if loss.reduction == "none":
        row_loss, lse, _, lse_coefficient, lse_low = below_autograd(
            _ops.cross_entropy_shard_join.default, *arguments, **loss.row_options.keywords()
        )
        value = reductions.reduce_rows(row_loss, lse, target, None, loss).value
    else:
        value, divisor, lse, lse_coefficient, lse_low = below_autograd(
            _ops.cross_entropy_shard_reduced.default, *arguments, **loss.keywords()
        )
    row_tensors = (None, None, None if weight is None else lse_coefficient)
    return value, (logits, target, lse, weight, divisor if loss.reduction == "mean" else None, *row_tensors, lse_low)


def gradient(grad: Tensor, saved: tuple[Tensor | None, ...], shard_range: tuple[int, int], loss: LossOptions) -> Tensor:
    """The gradient of the loss with respect to this rank's logits."""
    *row_args, lse_low = saved
    arguments: Any = (grad, None, *row_args, *shard_range)
    options: dict[str, Any] = {**loss.backward_keywords(), "lse_low": lse_low}
    if transforms.forward_mode():  # the upstream gradient has a tangent, which operators would drop
        return reference.cross_entropy_backward(*arguments, **as_record(options))
    operator = _ops.cross_entropy_backward.default
    if torch.is_grad_enabled():  # create_graph: the operator's formula says why there is no second derivative
        return operator(*arguments, **options)
    return below_autograd(operator, *arguments, **options)


class VocabParallelFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ranks: Ranks,
        shard_range: tuple[int, int],
        loss: LossOptions,
    ) -> Tensor:
        value, saved = loss_and_saved(logits, target, weight, ranks, shard_range, loss)
        ctx.save_for_backward(*saved)
        ctx.call = shard_range, loss
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gradient(grad, ctx.saved_tensors, *ctx.call), None, None, None, None, None


# As in ops/function.py.
apply: Callable[..., Tensor] = super(torch.autograd.Function, VocabParallelFunction).apply
