"""Operators of one rank's rows of the head: its statistics, and the join of all ranks'.

No operator communicates. The caller's all-gather (distributed/linear.py) stands between ``linear_cross_entropy_shard``,
which is called on detached tensors, and ``linear_cross_entropy_shard_join``, which carries the gradient. The join's
formula makes the logits again, since they are gone. There grad_input is this rank's part of a sum over ranks, which the
formula asks of torch's functional collectives: a node of the backward graph.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ...head import shard
from ...kernels import reference
from ...kernels.options import DEFAULTS, Options
from .. import checks as row_checks
from .. import transforms
from ..library import Outputs, autograd, needs_grad, operator, save_nothing
from ..shard import check_gathered
from . import checks

_ops = torch.ops.xent


def _check_join(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    gathered_input: Tensor | None = None,
    entropy: bool = False,
    *,
    group_name: str = "",
    **options: Any,
) -> None:
    rows = input if gathered_input is None else gathered_input
    checks.shard(rows, linear_weight, target, class_start, num_classes, linear_bias, weight, entropy, **options)
    check_gathered(gathered[:, : gathered.shape[-1] - target.numel()] if entropy else gathered, input, target, weight)
    if gathered_input is None:
        return
    expected = torch.Size((gathered_input.shape[0], *input.shape))
    row_checks.same_shape("gathered_input", gathered_input.shape, expected, "the inputs of all ranks")
    if not group_name:
        raise ValueError("gathered_input needs the group_name of the ranks that it was gathered from")


def _stats(
    input: Tensor,
    _linear_weight: Tensor,
    target: Tensor,
    _class_start: int,
    _num_classes: int,
    _linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    entropy: bool = False,
) -> Outputs:
    return (((1, shard.width(target.numel(), weight is not None, entropy)), reference.accumulator(input)),)


def _joined(input: Tensor, _linear_weight: Tensor, target: Tensor, *rest: Any) -> Outputs:
    dtype, entropy = reference.accumulator(input), len(rest) > 6 and rest[6]
    return *((target.shape, dtype),) * 4, (target.shape if entropy else (0,), dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    input, linear_weight, target, _, *ctx.shard_range, linear_bias, weight, gathered_input, entropy = inputs
    if needs_grad(ctx, 7):
        row_checks.weight_needs_grad()
    ctx.mask = [needs_grad(ctx, position) for position in (0, 1, 6)]
    _loss, lse, target_weight, coefficient, entropies = output
    ctx.mark_non_differentiable(target_weight, coefficient, *(() if entropy else (entropies,)))
    ctx.set_materialize_grads(False)
    rows = input if gathered_input is None else gathered_input
    of_rows = (None if weight is None else coefficient, entropies if entropy else None)
    ctx.save_for_backward(rows, linear_weight, target, lse, linear_bias, weight, *of_rows)
    ctx.scattered = gathered_input is not None
    ctx.options = dict(keyword_only_inputs)
    ctx.group_name = ctx.options.pop("group_name", "")


def _backward(
    ctx: Any,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    _weight: None,
    _coefficient: None,
    grad_entropy: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if grad_loss is None and grad_lse is None and grad_entropy is None:
        return (None,) * 10
    rows, linear_weight, target, lse, linear_bias, weight, coefficient, entropy = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(())
    head = (rows, linear_weight, target, lse, linear_bias, weight, None)
    of_rows = (grad_entropy, None if grad_entropy is None else entropy, coefficient)
    gradients = _ops.linear_cross_entropy_backward(
        grad_loss, grad_lse, *head, *of_rows, *ctx.shard_range, ctx.mask, **ctx.options
    )
    total, grad_weight, grad_bias = (
        gradient if wanted else None for gradient, wanted in zip(gradients, ctx.mask, strict=True)
    )
    if total is not None and ctx.group_name:
        total = _sum_over_ranks(total, ctx.group_name, ctx.scattered)
    return total, grad_weight, *(None,) * 4, grad_bias, *(None,) * 3


def _sum_over_ranks(gradient: Tensor, group_name: str, scattered: bool) -> Tensor:
    """Of (...) the sum; of (ranks, ...), where ``scattered``, this rank's part of it."""
    if transforms.is_batch(gradient):  # torch would run the collective on each, and stack them before they are there
        raise NotImplementedError(
            "the gradient of the input is summed over ranks by a collective, which takes no batch of upstream "
            "gradients (is_grads_batched=True, torch.vmap): call backward for each of them, or for a mean or a sum "
            "pass pipelined=True"
        )
    collectives = torch.ops._c10d_functional
    if scattered:
        total = collectives.reduce_scatter_tensor(gradient, "sum", gradient.shape[0], group_name)
        return collectives.wait_tensor(total)[0]
    return collectives.wait_tensor(collectives.all_reduce(gradient, "sum", group_name))


def _shard_alone(ctx: Any, grad: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::linear_cross_entropy_shard has no derivative: the gradient flows through the input and the weight of "
        "linear_cross_entropy_shard_join. Call it on detached tensors, or use "
        "xent_ops.distributed.vocab_parallel_linear_cross_entropy"
    )


def _stats_of_rows(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    *rest: Any,
    options: Options = DEFAULTS,
    **chunking: Any,
) -> Tensor:
    if input.device.type == "cpu":  # also where no row operator sees the targets; elsewhere the join makes NaN of them
        row_checks.target_values(target, num_classes, options.ignore_index)
    return shard.stats(input, linear_weight, target, class_start, num_classes, *rest, options=options, **chunking)


operator(
    "linear_cross_entropy_shard",
    check=checks.shard,
    outputs=_stats,
    reference=_stats_of_rows,
    composed=True,
)
autograd("linear_cross_entropy_shard", _shard_alone, save_nothing)

operator(
    "linear_cross_entropy_shard_join",
    check=_check_join,
    outputs=_joined,
    reference=shard.join,
    composed=True,
)
autograd("linear_cross_entropy_shard_join", _backward, _save)
