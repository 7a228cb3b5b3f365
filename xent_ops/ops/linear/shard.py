"""Operators for one rank's slice of the head: its statistics, and the join of all ranks' statistics.

The statistics are of detached tensors, and the caller's all-gather runs between both, as for ops/shard.py. The join's
formula computes the logits again, because they were not kept. Its grad_input is this rank's part of a sum over ranks.
The formula calls torch's functional collectives for the sum: a node of the backward graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...head import shard
from .. import checks, rank_sums, transforms
from ..contract import Call
from ..formulas import GradientsByName, autograd, run_backward, save_for
from ..library import operator
from ..rules import check_targets
from ..second_order import without_derivative
from .operators import by_name, mask_of


def _save(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    ctx.mask = mask_of(ctx)
    loss, lse, target_weight, lse_coefficient, entropy, lse_low, at_ids = output
    constants = (*(() if call.with_entropy else (entropy,)), at_ids if call.ids is None else loss)
    ctx.mark_non_differentiable(target_weight, lse_coefficient, lse_low, *constants)
    ctx.group_name, ctx.scattered = call.group_name, call.gathered_input is not None
    ctx.world, ctx.in_rank_order = call.gathered.shape[0], call.in_rank_order
    results = {"lse": lse, "lse_low": lse_low, "lse_coefficient": None if call.weight is None else lse_coefficient}
    results["entropy"] = entropy if call.with_entropy else None
    results["input"] = call.gathered_input if ctx.scattered else call.input
    save_for(ctx, "linear_cross_entropy_backward", call, at_ids=None if call.ids is None else at_ids, **results)


def _backward(ctx: Any, grad_loss: Any, grad_lse: Any, *grads: Any) -> GradientsByName:
    _target_weight, _lse_coefficient, grad_entropy, _lse_low, grad_ids = grads
    updates = {"grad_ids": grad_ids, "grad_lse": grad_lse, "grad_entropy": grad_entropy}
    gradients = by_name(ctx.mask, run_backward(ctx, grad_loss, **updates, output_mask=ctx.mask))
    total = gradients.get("input")
    if total is not None and ctx.group_name:
        gradients["input"] = _sum_over_ranks(total, ctx)
    return gradients


def _sum_over_ranks(gradient: Tensor, ctx: Any) -> Tensor:
    """The sum over ranks of (...); with ``scattered``, this rank's part of the sum of (ranks, ...)."""
    if transforms.is_batch(gradient):  # torch would stack the results of its collectives before they have arrived
        raise NotImplementedError(
            "the gradient of the input is summed over ranks by a collective, which takes no batch of upstream "
            "gradients (is_grads_batched=True, torch.vmap): call backward for each of them, or for a mean or a sum "
            "pass pipelined=True"
        )
    total = rank_sums.start(gradient, ctx.world, ctx.group_name, ctx.scattered, ctx.in_rank_order)
    total = rank_sums.wait(total)
    return total[0] if ctx.scattered else total


def _gathered_input(call: Call) -> None:
    if call.gathered_input is not None:
        expected = torch.Size((call.gathered_input.shape[0], *call.input.shape))
        checks.same_shape("gathered_input", call.gathered_input.shape, expected, "the inputs of all ranks")


operator(
    "linear_cross_entropy_shard",
    shard.linear_cross_entropy_shard,
    check_values=check_targets,
    calls_operators=True,
)
without_derivative(
    "linear_cross_entropy_shard",
    ": the gradient flows through the input and the weight of linear_cross_entropy_shard_join. Call it on detached "
    "tensors, or use xent_ops.linear_cross_entropy(shard=...)",
)

operator(
    "linear_cross_entropy_shard_join",
    shard.linear_cross_entropy_shard_join,
    arguments={"gathered_input": ("=input", "... H", "the inputs of all ranks")},
    rows_of=lambda call: call.input if call.gathered_input is None else call.gathered_input,
    rules=(_gathered_input,),
    calls_operators=True,
)
autograd("linear_cross_entropy_shard_join", _backward, _save, constants=("weight",))
