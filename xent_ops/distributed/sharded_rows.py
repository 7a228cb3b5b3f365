"""The loss of each row where each rank holds some classes of the head: two operators and one all-gather."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import reductions
from ..kernels.options import LossOptions
from ..linear_call import LinearCall
from ..ops.library import below_autograd
from ..ops.reduction import divisors_of
from .groups import Ranks
from .parts import all_gather, by_ranks

_ops = torch.ops.xent


class RowValues(NamedTuple):
    """One value a row, the same on every rank of the group."""

    loss: Tensor
    lse: Tensor
    weight: Tensor  # the class weight of the row's target; 0 in ignored rows; 1 without class weights


def sharded_rows(call: LinearCall, ranks: Ranks, with_entropy: bool = False) -> tuple[RowValues, Tensor, Tensor]:
    """(the values of each row, with ids x of them for a loss; entropies; lse_low), in the order of ``by_ranks``."""
    input, split, head = call.input, call.sequence_dim, call.head
    values: dict[str, Any] = {"linear_weight": head.weight, "linear_bias": head.bias, "weight": head.class_weight}
    values |= {"target": by_ranks(call.target, split, ranks), "ids": by_ranks(call.ids, split, ranks)}
    options = {**head.chunking.keywords(), **call.loss.row_options.keywords(), "with_entropy": with_entropy}
    options["class_start"], options["num_classes"] = head.shard_range
    gathered_input = None  # (ranks, *input.shape)
    if split is not None:
        gathered_input = all_gather(input.detach().unsqueeze(0).contiguous(), ranks)
    rows = input if gathered_input is None else gathered_input
    constants = {name: value if value is None else value.detach() for name, value in {**values, "input": rows}.items()}
    statistics = below_autograd(_ops.linear_cross_entropy_shard.default, **constants, **options)
    values |= {"input": input, "gathered": all_gather(statistics, ranks), "gathered_input": gathered_input}
    options |= {"accumulate_dtype": head.accumulate_dtype, "group_name": ranks.name if ranks.world > 1 else ""}
    row_loss, lse, target_weight, _, entropy, lse_low, at_ids = _ops.linear_cross_entropy_shard_join(
        **values, **options, in_rank_order=ranks.in_rank_order
    )
    return RowValues(row_loss if call.ids is None else at_ids, lse, target_weight), entropy, lse_low


def reduced(
    rows: RowValues, target: Tensor, loss: LossOptions, divisor: Tensor | None, token_weight: Tensor | None = None
) -> Tensor:
    if loss.reduction == "none":
        return reductions.reduce_rows(rows.loss, rows.lse, target, None, loss, token_weight).value
    if loss.reduction == "mean":
        divisors = reductions.divisor_of(rows.weight, target, loss.row_options.ignore_index, token_weight)
    else:
        divisors = divisors_of(target, None, None, divisor, loss, rows.lse.dtype)
    mean = loss._replace(reduction="mean")
    return reductions.reduce_rows(rows.loss, rows.lse, target, divisors, mean, token_weight).value
