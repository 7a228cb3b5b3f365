"""A user's function of each token's statistics where each rank holds some rows of the head.

The function stands behind the join, where every rank has the statistics of all tokens: each calls it on the same
numbers, and gets the same bits. The collectives are those of linear.py, with 4 numbers a row where it reads entropies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.options import HeadProducts
from ..kernels.reference import accumulator
from ..ops import arguments, checks
from ..ops.library import refuse
from ..ops.token_logits import target_and_ids
from ..token_function import Function, TokenFunction, divided, of_chunks
from . import consistency
from .bound import Bound, bound_call, by_ranks, checked_call, gathered_input
from .groups import Group, ranks_of
from .pipelined import Collectives
from .sharded_rows import sharded_rows


class _Bound(NamedTuple):
    """A call as the operators take it; consistency.py compares all of it but the function."""

    call: Bound
    rows: list[Tensor]
    reads_entropy: bool


@arguments.named
def vocab_parallel_linear_token_loss(
    input: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    fn: Function,
    group: Group = None,
    *,
    num_classes: int,
    class_start: int | None = None,
    rows: tuple[Tensor, ...] = (),
    bias_shard: Tensor | None = None,
    sequence_parallel: bool = False,
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    products: HeadProducts | None = None,
    check: bool = False,
) -> Tensor:
    """``xent_ops.linear_token_loss`` of a head whose rows (classes) are split between the ranks of a group.

    Every rank gets the loss, bit for bit the same, and in backward the gradient of its own rows of the head and the
    whole gradient of its input: three products, and two chunks of logits at a time.

    Args:
        input, weight_shard, target, group, num_classes, class_start, bias_shard, sequence_parallel: as for
            ``vocab_parallel_linear_cross_entropy``.
        fn, rows: as for ``xent_ops.linear_token_loss``, of all tokens, the same on every rank: with
            ``sequence_parallel`` too.
        divisor, ignore_index, softcap, logit_scale, accumulate_dtype, chunk_rows, logits_dtype, products: as for
            ``xent_ops.linear_token_loss``.
        skip_ignored: as for ``vocab_parallel_linear_cross_entropy``: four products, of the counted rows.
            Of several classes a row three, of all rows: there it has no effect, and ``products`` are refused.
        check: as for ``vocab_parallel_linear_cross_entropy``; compares the values of ``rows``, and fn on all tokens
            with fn on parts of them (not where a row has several classes).

    Returns:
        The loss, float32 (float64 for float64 input), (). Errors are those of ``xent_ops.linear_token_loss`` and
        ``vocab_parallel_linear_cross_entropy``.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> hidden, weight_shard = torch.randn(8, 16), torch.randn(1024 // world, 16, requires_grad=True)
        >>> function = xent_ops.distributed.vocab_parallel_linear_token_loss
        >>> focal = lambda stats: -((1 - stats.log_probs.exp()) ** 2) * stats.log_probs
        >>> function(hidden, weight_shard, torch.arange(8), focal, num_classes=1024, divisor=8).backward()
    """
    name, ranks = "vocab_parallel_linear_token_loss", ranks_of(group)
    options = (ignore_index, 0.0, softcap, logit_scale, 0.0, "sum")
    of_head = (bias_shard, None, num_classes, class_start, sequence_parallel, options)
    chunks = (divisor, None, accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products)
    arguments.boolean("check", check)

    def bound_by(bind: Callable[..., Bound]) -> tuple[Bound, TokenFunction, Tensor | None]:
        arguments.linear(input, weight_shard, target, bias_shard, names=("weight_shard", "bias_shard"))
        of_rows, ids = target_and_ids(target, input.dim() - 1, arguments.integer("ignore_index", ignore_index))
        bound = bind(name, ranks, None, input, weight_shard, of_rows, *of_head, *chunks)
        options = bound.loss.rows
        if ids is not None:
            checks.refuse_products_of_ids(bound.head.chunking.products)
            logits = input.new_empty(()).expand(*of_rows.shape, num_classes)
            refuse("token_logits", logits, ids, **options._asdict())
        return bound, TokenFunction(fn, rows, of_rows, options.ignore_index, accumulator(input), ids), ids

    def checked() -> _Bound:
        bound, function, ids = bound_by(checked_call)
        if ids is not None:
            checks.target_values(ids, num_classes, bound.loss.rows.ignore_index)
        return _Bound(bound, function.rows, function.reads_entropy)

    if check:
        consistency.check(name, group, ranks, checked)
    bound, function, ids = bound_by(bound_call)
    target, input, head, loss, by, split, three_products, *_ = bound
    function.arrange(lambda row: by_ranks(row, split, ranks))
    if ids is not None:  # by the loop, of all rows: no other way knows several classes a row
        three_products, head = True, head._replace(chunking=head.chunking._replace(skip_ignored=False))

    def of_rows() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        gathered, ordered = gathered_input(input, target, split, ranks)
        made, entropy = sharded_rows(input, ordered, head, ranks, loss, gathered, with_entropy=function.reads_entropy)
        return (made.loss, made.lse, entropy), ordered

    if check and ids is None:
        with torch.no_grad():
            statistics, ordered = of_rows()
            function.check(*statistics, ordered)
    if not three_products:
        statistics, ordered = of_rows()
        return divided(function.of_all(*statistics, ordered), by)
    ordered, scattered = by_ranks(target, split, ranks), split is not None
    return of_chunks(function, input, ordered, head, loss, by, Collectives(ranks), scattered=scattered)
