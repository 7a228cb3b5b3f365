"""Row operators for a vocabulary that is split over ranks: the statistics of one shard, and the join of all shards.

No operator communicates. The caller's all-gather (distributed/parts.py) runs between ``cross_entropy_shard``, which is
called on detached logits, and the join, where every tracer and every pass that moves collectives can see it. The join,
of rows or reduced, carries the gradient. It takes the logits, but does not read their values. Its formula is
``cross_entropy_backward`` of a slice, which needs no collective because it has the lse of the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import reference_shard
from .contract import Call
from .formulas import GradientsByName, autograd, run_backward, save_for
from .library import operator
from .rules import check_targets
from .second_order import without_derivative


def _save(ctx: Any, call: Call, lse_coefficient: Tensor, **results: Any) -> None:
    save_for(
        ctx, "cross_entropy_backward", call, lse_coefficient=None if call.weight is None else lse_coefficient, **results
    )


def _save_rows(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    _loss, lse, target_weight, lse_coefficient, lse_low = output
    ctx.mark_non_differentiable(target_weight, lse_coefficient, lse_low)
    _save(ctx, call, lse_coefficient, lse=lse, lse_low=lse_low)


def _save_reduced(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    _value, divisors, lse, lse_coefficient, lse_low = output
    ctx.mark_non_differentiable(divisors, lse_coefficient, lse_low)
    results = {"lse": lse, "lse_low": lse_low, "divisors": divisors if call.reduction == "mean" else None}
    _save(ctx, call, lse_coefficient, **results)


def _rows_backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: None) -> GradientsByName:
    return {"logits": run_backward(ctx, grad_loss, grad_lse=grad_lse)}


def _reduced_backward(ctx: Any, grad_value: Any, _divisor: None, grad_lse: Any, *_: None) -> GradientsByName:
    return _rows_backward(ctx, grad_value, grad_lse)


operator("cross_entropy_shard", reference_shard.cross_entropy_shard, check_values=check_targets, ascend=True)
without_derivative(
    "cross_entropy_shard",
    ": the gradient flows through the logits of cross_entropy_shard_join. Call it on detached logits, or use "
    "xent_ops.distributed.vocab_parallel_cross_entropy",
)

operator("cross_entropy_shard_join", reference_shard.cross_entropy_shard_join, ascend=True)
autograd("cross_entropy_shard_join", _rows_backward, _save_rows, constants=("weight",))

operator("cross_entropy_shard_reduced", reference_shard.cross_entropy_shard_reduced, ascend=True)
autograd("cross_entropy_shard_reduced", _reduced_backward, _save_reduced, constants=("weight",))
