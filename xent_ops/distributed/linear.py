"""Linear cross entropy where each rank holds some rows of the head.

Two ways. Where gradients of a mean or a sum are wanted, pipelined.py: three products, two chunks of logits at a time.
Else, and with ``pipelined=False``, four products and one chunk, N rows of input of width H in chunks of rows:

    forward     a chunk's logits of this rank's classes, their statistics      xent::linear_cross_entropy_shard
                one all-gather of 3 numbers a row (4 with class weights)
                the loss and lse of every row                                  xent::linear_cross_entropy_shard_join
    backward    a chunk's logits again, their gradient over them, both         xent::linear_cross_entropy_backward
                products of it
                the sum of grad_input over the ranks: one all-reduce

With ``sequence_parallel`` the input is all-gathered before the first step, and the last is a reduce-scatter. Every
collective is a ``_c10d_functional`` node between operators. The gathers run below autograd: the formula of the join
(ops/linear/shard.py) returns the gradient of the rank's own input, summed over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import few_classes
from ..kernels.options import HeadProducts, LossOptions, Reduction
from ..kernels.reference_ids import first_counted
from ..ops import arguments, checks
from ..ops.linear import checks as linear_checks
from ..outputs import TokenLogProbs, log_probs_of_rows
from . import consistency, token_loss
from .bound import Bound, as_target, bound_call, by_ranks, checked_call, gathered_input
from .groups import Group, ranks_of
from .pipelined import loss as pipelined_loss
from .sharded_rows import reduced, sharded_rows


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
    target_probs: Tensor | None = None,
    tail: bool = False,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    pipelined: bool | None = None,
    check: bool = False,
) -> Tensor:
    """``xent_ops.linear_cross_entropy`` of a head whose rows (classes) are split between the ranks of a group.

    Every rank gets the loss, bit for bit the same, and in backward the gradient of its own rows of the head and the
    whole gradient of its input. No rank ever has more than two chunks of its own logits. 3 numbers a row (4 with class
    weights) are all-gathered, and the input's gradient is all-reduced. No second derivative, no torch.func, no
    forward-mode AD.

    Args:
        input: (..., H), the same on every rank, and requiring grad on every rank or on none; with
            ``sequence_parallel`` this rank's part of it.
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
        token_weight: as in ``xent_ops.cross_entropy``, of all targets, the same on every rank.
        target_probs, tail: as for ``xent_ops.linear_cross_entropy``, the same on every rank, for a mean or a sum: three
            products of all rows, without ``pipelined``, ``skip_ignored`` and ``products``.
        accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products: as for ``xent_ops.linear_cross_entropy``, of
            this rank's products. With ``products`` four of them: not pipelined.
        pipelined: True: three products. The forward gathers a chunk's numbers while the next chunk's product runs, and
            makes the gradients, which the backward multiplies by the upstream gradient, in place; two chunks of logits.
            False: four. The forward gathers the numbers of all rows at once, and the backward makes the logits again;
            one chunk. None: pipelined where gradients of a mean or a sum are wanted, but not with ``skip_ignored``,
            which pipelined=True refuses, nor inside an eager checkpoint. Inside a compiled one Inductor saves the
            gradients; with another backend pass False. A compiled graph has the loop over the chunks unrolled: another
            number is another graph. All ranks must take one way, with one ``chunk_rows``: weights and biases require
            grad on every rank or on none.
        check: as for ``vocab_parallel_cross_entropy``; it does not compare the values of inputs.
        ignore_index, reduction, label_smoothing, lse_square_scale, softcap, logit_scale: as in
            ``xent_ops.cross_entropy``; smoothing spreads over all ``num_classes``.

    Returns:
        The loss, float32 (float64 for float64 input): (), or the target's shape with reduction="none".

    Errors are those of ``vocab_parallel_cross_entropy`` and of ``xent_ops.linear_cross_entropy``. Below torch.autocast
    input, weight_shard and bias_shard are cast as for nn.Linear.

    Shards that do not tile the vocabulary give NaN on every rank, and what differs between ranks wrong numbers, as for
    ``vocab_parallel_cross_entropy``.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> head = torch.nn.Linear(16, 1024 // world, bias=False)  # this rank's rows
        >>> hidden, target = torch.randn(8, 16, requires_grad=True), torch.arange(8)
        >>> function = xent_ops.distributed.vocab_parallel_linear_cross_entropy
        >>> function(hidden, head.weight, target, num_classes=1024).backward()
    """
    options = (ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction)
    chunks = (divisor, token_weight, accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products)
    name, ranks = "vocab_parallel_linear_cross_entropy", ranks_of(group)

    def call_with(target: Tensor) -> tuple[Any, ...]:
        of_head = (input, weight_shard, target, bias_shard, weight, num_classes, class_start, sequence_parallel)
        return *of_head, options, *chunks

    def few() -> LossOptions:
        arguments.linear(input, weight_shard, target, bias_shard, weight, names=("weight_shard", "bias_shard"))
        loss = arguments.loss_options(*options, input.dtype)
        few_classes.checked(target, input.dim() - 1, target_probs, tail, weight, loss, token_weight)
        if reduction == "none":
            raise ValueError('target_probs over ranks takes reduction="mean" or "sum", got "none"')
        for option, value, kept in (("pipelined", pipelined, None), ("skip_ignored", skip_ignored, False)):
            if value is not kept:
                raise ValueError(
                    f"{option}={value!r} is not offered beside target_probs over ranks, which takes three products of "
                    "all rows: leave it out"
                )
        linear_checks.reduced_by(arguments.divisor(divisor, input), input, reduction)
        return loss

    def checked() -> Bound:
        if target_probs is None:
            few_classes.without_probs(tail)
            return checked_call(name, ranks, pipelined, *call_with(target))._replace(tail=tail)
        ignore_index = few().rows.ignore_index
        checks.target_values(target, num_classes, ignore_index)
        bound = checked_call(name, ranks, None, *call_with(first_counted(target, ignore_index)))
        return bound._replace(ids=target, target_probs=target_probs, tail=tail)

    if check:
        consistency.check(name, group, ranks, checked)
    if target_probs is not None:
        of_few = (target_probs, tail, few(), divisor, token_weight)
        fn, rows, divisor = few_classes.as_function(input, target, *of_few)
        return token_loss.vocab_parallel_linear_token_loss(
            input,
            weight_shard,
            target,
            fn,
            group,
            num_classes=num_classes,
            class_start=class_start,
            rows=rows,
            bias_shard=bias_shard,
            sequence_parallel=sequence_parallel,
            divisor=divisor,
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=logit_scale,
            accumulate_dtype=accumulate_dtype,
            chunk_rows=chunk_rows,
            logits_dtype=logits_dtype,
            products=products,
        )
    few_classes.without_probs(tail)
    bound = bound_call(name, ranks, pipelined, *call_with(target))
    target, input, head, loss, divisor, split = bound[:6]
    if bound.token_weight is not None:
        token_weight = by_ranks(bound.token_weight, split, ranks)
    if bound.pipelined:
        scattered, ordered = split is not None, by_ranks(target, split, ranks)
        return pipelined_loss(input, ordered, head, ranks, loss, divisor, scattered, token_weight=token_weight)
    gathered, target = gathered_input(input, target, split, ranks)
    rows, _ = sharded_rows(input, target, head, ranks, loss, gathered)
    value = reduced(rows, target, loss, divisor, token_weight)
    return as_target(value, split) if reduction == "none" else value


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
    check: bool = False,
) -> TokenLogProbs:
    """``xent_ops.linear_token_log_probs`` of a head whose rows (classes) are split between the ranks of a group.

    Arguments, errors and communication are those of ``vocab_parallel_linear_cross_entropy``, with 4 numbers a row in
    the all-gather. Every rank gets the same bits.

    Returns:
        ``TokenLogProbs(log_probs, entropy, lse)``, each float32 (float64 for float64 input) of the target's shape.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> hidden, weight_shard = torch.randn(8, 16), torch.randn(1024 // world, 16, requires_grad=True)
        >>> function = xent_ops.distributed.vocab_parallel_linear_token_log_probs
        >>> log_probs, entropy, _ = function(hidden, weight_shard, torch.arange(8), num_classes=1024)
        >>> (-log_probs - 0.01 * entropy).mean().backward()
    """
    options = (ignore_index, 0.0, softcap, logit_scale, 0.0, "none")
    call = (input, weight_shard, target, bias_shard, None, num_classes, class_start, sequence_parallel, options)
    chunks = (None, None, accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products)
    name, ranks = "vocab_parallel_linear_token_log_probs", ranks_of(group)
    if check:
        consistency.check(name, group, ranks, lambda: checked_call(name, ranks, False, *call, *chunks))
    target, input, head, loss, _, split = bound_call(name, ranks, False, *call, *chunks)[:6]
    gathered, target = gathered_input(input, target, split, ranks)
    rows, entropy = sharded_rows(input, target, head, ranks, loss, gathered, with_entropy=True)
    values = log_probs_of_rows(rows.loss, rows.lse, entropy, target, None, loss.rows)
    return TokenLogProbs(*(as_target(value, split) for value in values))
