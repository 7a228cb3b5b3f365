"""Linear cross entropy where each rank holds some rows of the head.

pipelined.py computes the calls of its ``is_pipelined``, sharded_rows.py the others. docs/distributed.md has both ways.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.options import HeadProducts, Reduction
from ..linear_call import LinearCall, bind
from ..ops import arguments
from ..outputs import TokenLogProbs, log_probs_of_rows
from . import consistency
from .bound import NAMES, bind_shard
from .groups import Group, Ranks, ranks_of
from .parts import as_target, by_ranks
from .pipelined import loss as pipelined_loss
from .sharded_rows import RowValues, reduced, sharded_rows


@arguments.named
def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: Group = None,
    *,
    num_classes: int,
    class_start: int | None = None,
    bias_shard: Tensor | None = None,
    sequence_parallel: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    divisor: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    batch_invariant: bool = False,
    pipelined: bool | None = None,
    check: bool = False,
) -> Tensor:
    """``xent_ops.linear_cross_entropy`` of a head whose rows (classes) are split between the ranks of a group.

    Every rank gets the same loss, bit for bit. Backward returns the gradient of its own rows of the head, and the whole
    gradient of its input. No rank ever has more than two chunks of its own logits. 3 numbers a row (4 with class
    weights) are all-gathered, and the input's gradient is all-reduced. Second derivatives, torch.func and forward-mode
    AD are not supported.

    Args:
        input: (..., H), the same on every rank; with ``sequence_parallel`` this rank's part of it. It requires grad on
            every rank or on none.
        weight_shard: (classes of this rank, H), the rows of the head from ``class_start`` on, of the input's dtype.
            Shards may differ in size and may be empty. Rows beyond ``num_classes`` are padding, with a gradient of 0.
        target: (...), class indices of the whole vocabulary, the same on every rank.
        group, num_classes, class_start: as for ``vocab_parallel_cross_entropy``.
        bias_shard: (classes of this rank,), of the input's dtype; on every rank or on none.
        sequence_parallel: the input is split evenly over the ranks along one dimension of the target, in the ranks'
            order: (S / ranks, B, H) or (B, S / ranks, H). It is gathered in forward and kept for the backward, where
            its gradient is reduce-scattered instead of all-reduced.
        weight: (classes of this rank,), this rank's slice of the class weights; on every rank or on none.
        divisor: for reduction="sum", as for ``xent_ops.linear_cross_entropy``; the same on every rank.
        token_weight: as in ``xent_ops.cross_entropy``, for all targets, the same on every rank.
        accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products: as for ``xent_ops.linear_cross_entropy``,
            for this rank's matrix multiplications. With ``products`` there are four, not pipelined.
        batch_invariant: as for ``xent_ops.linear_cross_entropy``, for one number of ranks and one split of the classes.
            With three or more ranks the input's gradient is summed in the order of the ranks, by an all-to-all and an
            all-gather.
        pipelined: True: three matrix multiplications, two chunks of logits. The forward gathers a chunk's statistics
            while the next chunk's matrix multiplication runs, and computes the gradients. The backward scales them in
            place by the upstream gradient. False: four, one chunk of logits. The forward gathers the statistics of all
            rows at once, and the backward computes the logits again. None: True if gradients of a mean or a sum are
            wanted, except with ``skip_ignored`` or ``products`` (True refuses both) and inside an eager checkpoint.
            Inside a compiled checkpoint Inductor saves the gradients; pass False for another backend. A compiled graph
            unrolls the loop, so another number of chunks is another graph. All ranks must use the same way and the same
            ``chunk_rows``: weights and biases require grad on every rank or on none.
        check: as for ``vocab_parallel_cross_entropy``; it does not compare the values of inputs.
        ignore_index, reduction, label_smoothing, lse_square_scale, softcap, logit_scale: as in
            ``xent_ops.cross_entropy``; smoothing spreads over all ``num_classes``.

    Returns:
        The loss, float32 (float64 for float64 input): (), or the target's shape with reduction="none".

    Errors are those of ``vocab_parallel_cross_entropy`` and of ``xent_ops.linear_cross_entropy``. Under torch.autocast
    input, weight_shard and bias_shard are cast as for nn.Linear.

    Shards that do not tile the vocabulary give NaN on every rank. Arguments that differ between ranks give wrong
    numbers, as for ``vocab_parallel_cross_entropy``.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> head = torch.nn.Linear(16, 1024 // world, bias=False)  # this rank's rows
        >>> hidden, target = torch.randn(8, 16, requires_grad=True), torch.arange(8)
        >>> function = xent_ops.distributed.vocab_parallel_linear_cross_entropy
        >>> function(hidden, head.weight, target, num_classes=1024).backward()
    """
    name, ranks = "vocab_parallel_linear_cross_entropy", ranks_of(group)
    raw_options = (ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction)
    raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)

    def bind_call() -> LinearCall:
        head_args = (input, weight_shard, target, bias_shard, weight)
        call = bind(*head_args, raw_options, raw_chunking, divisor, token_weight, names=NAMES)
        return bind_shard(call, ranks, pipelined, num_classes, class_start, sequence_parallel, check)

    call = consistency.bound(name, group, ranks, bind_call, check)
    return _loss(call, ranks.for_batches(call.head.chunking.batch_invariant))


def _loss(call: LinearCall, ranks: Ranks) -> Tensor:
    if call.pipelined:
        return pipelined_loss(call, ranks)[0]
    split = call.sequence_dim
    rows, _ = sharded_rows(call, ranks)
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


@arguments.named
def vocab_parallel_linear_token_log_probs(
    input: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: Group = None,
    *,
    num_classes: int,
    class_start: int | None = None,
    bias_shard: Tensor | None = None,
    sequence_parallel: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    batch_invariant: bool = False,
    check: bool = False,
) -> TokenLogProbs:
    """``xent_ops.linear_token_log_probs`` of a head whose rows (classes) are split between the ranks of a group.

    Arguments, errors and communication are those of ``vocab_parallel_linear_cross_entropy``, with 4 numbers a row in
    the all-gather. The target may be (..., K), K classes a row: K numbers more. Every rank gets the same bits.

    Returns:
        ``TokenLogProbs(log_probs, entropy, lse)``, each float32 (float64 for float64 input) with one number per row;
        log_probs has the target's shape.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> hidden, weight_shard = torch.randn(8, 16), torch.randn(1024 // world, 16, requires_grad=True)
        >>> function = xent_ops.distributed.vocab_parallel_linear_token_log_probs
        >>> log_probs, entropy, _ = function(hidden, weight_shard, torch.arange(8), num_classes=1024)
        >>> (-log_probs - 0.01 * entropy).mean().backward()
    """
    name, ranks = "vocab_parallel_linear_token_log_probs", ranks_of(group)
    raw_options = (ignore_index, 0.0, softcap, logit_scale, 0.0, "none")
    raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)

    def bind_call() -> LinearCall:
        head_args = (input, weight_shard, target, bias_shard, None)
        call = bind(*head_args, raw_options, raw_chunking, several=True, names=NAMES)
        return bind_shard(call, ranks, False, num_classes, class_start, sequence_parallel, check)

    call = consistency.bound(name, group, ranks, bind_call, check)
    ranks = ranks.for_batches(call.head.chunking.batch_invariant)
    rows, entropy = sharded_rows(call, ranks, with_entropy=True)
    ids = by_ranks(call.ids, call.sequence_dim, ranks)
    values = log_probs_of_rows(rows.loss, rows.lse, entropy, ids, call.loss.row_options.ignore_index)
    return TokenLogProbs(*(as_target(value, call.sequence_dim) for value in values))
