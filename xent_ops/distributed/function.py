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


class VocabParallelFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # (..., columns of this rank)
        target: Tensor,  # (...)
        weight: Tensor | None,  # (columns of this rank,)
        ranks: Ranks,
        shard_range: tuple[int, int],  # class_start, num_classes
        loss: LossOptions,
    ) -> Tensor:
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
        divisor = divisor if loss.reduction == "mean" else None
        lse_coefficient = None if weight is None else lse_coefficient
        ctx.save_for_backward(logits, target, lse, weight, divisor, lse_coefficient, lse_low)
        ctx.call = shard_range, loss
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *row_args, lse_coefficient, lse_low = ctx.saved_tensors
        shard_range, loss = ctx.call
        arguments = (grad, None, *row_args, None, None, lse_coefficient, *shard_range)
        options = {**loss.backward_keywords(), "lse_low": lse_low}
        operator = _ops.cross_entropy_backward.default
        if transforms.forward_mode():  # the upstream gradient has a tangent, which operators would drop
            gradient = reference.cross_entropy_backward(*arguments, **as_record(options))
        elif torch.is_grad_enabled():  # create_graph: the operator's formula says why there is no second derivative
            gradient = operator(*arguments, **options)
        else:
            gradient = below_autograd(operator, *arguments, **options)
        return gradient, None, None, None, None, None


# As in ops/function.py.
apply: Callable[..., Tensor] = super(torch.autograd.Function, VocabParallelFunction).apply
