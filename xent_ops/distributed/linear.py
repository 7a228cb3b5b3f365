"""Linear cross entropy where each rank holds some rows of the head.

pipelined.py computes the calls of its ``is_pipelined``, sharded_rows.py the others. docs/distributed.md has both ways.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..linear_call import LinearCall
from ..outputs import TokenLogProbs, log_probs_of_rows
from .bound import Shard, bind_over_ranks, bind_shard
from .groups import Ranks
from .parts import as_target, by_ranks
from .pipelined import pipelined_loss
from .sharded_rows import RowValues, reduced, sharded_rows


def cross_entropy(shard: Shard, bind_call: Callable[[], LinearCall]) -> Tensor:
    call, ranks = bind_over_ranks("linear_cross_entropy", shard, lambda ranks: bind_shard(bind_call(), ranks, shard))
    return _loss(call, ranks.for_batches(call.head.chunking.batch_invariant))


def _loss(call: LinearCall, ranks: Ranks) -> Tensor:
    if call.pipelined:
        return pipelined_loss(call, ranks)[0]
    split = call.sequence_dim
    rows, *_ = sharded_rows(call, ranks)
    factors = by_ranks(call.token_weight, split, ranks)
    value = reduced(rows, by_ranks(call.target, split, ranks), call.loss, call.divisor, factors)
    return as_target(value, split) if call.loss.reduction == "none" else value


def losses_and_sum(call: LinearCall, ranks: Ranks) -> tuple[Tensor, Tensor | None]:
    """(the loss of each row, their sum with ``token_weight``), for a bound call with reduction="sum".

    The sum has the gradients, from three products, and the losses are constants. Where ``call`` is not pipelined, the
    losses have the gradients, from four products, and there is no sum.
    """
    ranks, of_rows = ranks.for_batches(call.head.chunking.batch_invariant), call.loss._replace(reduction="none")
    if not call.pipelined:
        return _loss(call._replace(loss=of_rows, token_weight=None), ranks), None
    total, chunks = pipelined_loss(call, ranks)
    split = call.sequence_dim
    ordered, parts = by_ranks(call.target, split, ranks), 1 if split is None else ranks.world
    columns = (torch.cat([rows.view(parts, -1) for rows in column], 1) for column in zip(*chunks, strict=True))
    number = ordered.numel() // parts  # batch_invariant=True fills the last chunk up
    rows = RowValues(*(column[:, :number].reshape(ordered.shape) for column in columns))
    return as_target(reduced(rows, ordered, of_rows, None), split), total


def token_log_probs(shard: Shard, bind_call: Callable[[], LinearCall]) -> TokenLogProbs:
    call, ranks = bind_over_ranks("linear_token_log_probs", shard, lambda ranks: bind_shard(bind_call(), ranks, shard))
    ranks = ranks.for_batches(call.head.chunking.batch_invariant)
    rows, entropy, low = sharded_rows(call, ranks, with_entropy=True)
    ids = by_ranks(call.ids, call.sequence_dim, ranks)
    values = log_probs_of_rows(rows.loss, rows.lse, entropy, low, ids, call.loss.row_options.ignore_index)
    return TokenLogProbs(*(as_target(value, call.sequence_dim) for value in values))
