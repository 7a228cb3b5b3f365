"""A user's function of each token's statistics where each rank holds some rows of the head.

Every rank calls the function after the join, on the same statistics of all tokens, and so gets the same bits. The
collectives are those of docs/distributed.md, with 4 numbers a row if the function reads entropies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..kernels.options import HeadProducts, TokenReduction
from ..kernels.reference import accumulator
from ..linear_call import LinearCall, bind, statistics
from ..ops import arguments, checks
from ..token_function import TokenFunction, loss_by_chunks
from ..user_function import Function, TokenRows, UserFunction
from . import consistency, on_dtensors
from .bound import NAMES, bind_shard
from .groups import Group, Ranks, ranks_of
from .parts import shard_range
from .pipelined import Collectives, arrange, is_pipelined
from .sharded_rows import sharded_rows


class _Bound(NamedTuple):
    """consistency.py compares all of it."""

    call: LinearCall
    function: TokenFunction


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
    reduction: TokenReduction = "mean",
    divisor: Tensor | float | None = None,
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
) -> Tensor:
    """``xent_ops.linear_token_loss`` of a head whose rows (classes) are split between the ranks of a group.

    Every rank gets the same loss, bit for bit. Backward returns the gradient of its own rows of the head, and the whole
    gradient of its input. A step takes three matrix multiplications (four in float16), and holds two chunks of logits.

    Args:
        input, weight_shard, target, group, num_classes, class_start, bias_shard, sequence_parallel: as for
            ``vocab_parallel_linear_cross_entropy``.
        fn, rows: as for ``xent_ops.linear_token_loss``, for all tokens, the same on every rank, also with
            ``sequence_parallel``.
        reduction, divisor, ignore_index, softcap, logit_scale: as for ``xent_ops.linear_token_loss``.
        accumulate_dtype, chunk_rows, logits_dtype, products: as for ``xent_ops.linear_token_loss``.
        batch_invariant: as for ``vocab_parallel_linear_cross_entropy``.
        skip_ignored: as for ``vocab_parallel_linear_cross_entropy``: four matrix multiplications, without ignored rows.
            With several classes a row it has no effect: three of all rows, and ``products`` is refused.
        check: as for ``vocab_parallel_linear_cross_entropy``. It also compares the values of ``rows``, and fn on all
            tokens with fn on parts of them (except with several classes a row).

    Returns:
        The loss, float32 (float64 for float64 input), (). Errors are those of ``xent_ops.linear_token_loss`` and
        ``vocab_parallel_linear_cross_entropy``.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> hidden, weight_shard = torch.randn(8, 16), torch.randn(1024 // world, 16, requires_grad=True)
        >>> function = xent_ops.distributed.vocab_parallel_linear_token_loss
        >>> focal = lambda stats: -((1 - stats.log_probs.exp()) ** 2) * stats.log_probs
        >>> function(hidden, weight_shard, torch.arange(8), focal, num_classes=1024).backward()
    """
    name, ranks = "vocab_parallel_linear_token_loss", ranks_of(group)
    raw_options = (ignore_index, 0.0, softcap, logit_scale, 0.0, reduction)
    raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, products, batch_invariant)

    def bind_function() -> _Bound:
        head_args = (input, weight_shard, target, bias_shard, None)
        call = bind(*head_args, raw_options, raw_chunking, divisor, several=True, names=NAMES)
        checks.reduction(reduction, ("mean", "sum"))
        call = bind_shard(call, ranks, None, num_classes, class_start, sequence_parallel, check)
        ignore_index = call.loss.row_options.ignore_index
        learned, dtype = (call.input, call.head.weight, call.head.bias), accumulator(call.input)
        function = TokenFunction(fn, rows, call.target, ignore_index, dtype, call.ids, learned=learned)
        return _Bound(call, function)

    call, function = consistency.bound(name, group, ranks, bind_function, check)
    return loss(call.as_sum(), function, ranks.for_batches(call.head.chunking.batch_invariant), check)


def loss(call: LinearCall, function: TokenRows, ranks: Ranks, check: bool = False) -> Tensor:
    ordered = arrange(call, function, ranks)

    def of_rows() -> tuple[Tensor, Tensor, Tensor]:
        rows, entropy = sharded_rows(call, ranks, with_entropy=function.reads_entropy)
        return rows.loss, rows.lse, entropy

    if check and call.ids is None and isinstance(function, UserFunction):
        with torch.no_grad():
            function.check(*of_rows(), ordered)
    # In float16 each row's factor (head/float16.py) follows from the derivatives of all rows.
    if call.ids is None and not (call.pipelined and call.input.dtype != torch.float16):
        return function.sum(function.all_values(*of_rows(), ordered), ordered, call.divisor)
    if call.ids is not None:  # only the loop over all rows supports several classes a row
        call = call._replace(head=call.head._replace(chunking=call.head.chunking._replace(skip_ignored=False)))
    return loss_by_chunks(call, ordered, function, Collectives(ranks))


def of_dtensors(call: LinearCall, fn: Function, rows: Any, check: bool) -> Tensor:
    """``xent_ops.linear_token_loss`` of DTensors, a DTensor. ``fn`` sees the tokens of this rank."""
    call = call.in_autocast_dtype()
    tensors: Any = (call.input, call.head.weight, call.head.bias, call.target)
    input, weight, bias, target = tensors
    at = on_dtensors.layout.of_head(input, weight, bias)
    if at.is_outside:  # a sum of nothing, with a graph
        learned = [tensor for tensor in (input, weight, bias) if tensor is not None]
        sums: Any = [tensor.redistribute(at.mesh, at.replicated).sum() for tensor in learned]
        return sum(sums).to(accumulator(input))
    if isinstance(rows, (tuple, list)):  # TokenFunction refuses other types
        rows = [row.to_local() if isinstance(row, DTensor) else row for row in at.beside(target, *rows)[1:]]
    target = target.to_local()
    # The loop adds up the input's gradient over the ranks that share the vocabulary.
    x = _part(input, at.mesh, at.rows, at.rows)
    w, b = (_part(tensor, at.mesh, at.of_head(at.replicated), at.of_head(at.partial)) for tensor in (weight, bias))
    head = call.head._replace(weight=w, bias=b, shard_range=shard_range(w.shape[0], at.num_classes, None, at.ranks))
    mine = call._replace(input=x, head=head, target=target).as_sum()
    if call.loss.reduction == "mean":
        mine = mine._replace(divisor=at.total(mine.divisor))  # type: ignore[arg-type]
    ignore_index = call.loss.row_options.ignore_index
    function = TokenFunction(fn, rows, target, ignore_index, accumulator(x), learned=(x, w, b))

    def of_rows() -> tuple[Tensor, Tensor, Tensor]:
        values: Any = statistics(call, function.reads_entropy)
        loss, lse, entropy = (value.to_local() for value in values)
        return loss, lse, entropy

    if check:
        with torch.no_grad():
            function.check(*of_rows(), target)
    if is_pipelined(None, x, head, mine.loss) and x.dtype != torch.float16:
        total = loss_by_chunks(mine, target, function, Collectives(at.ranks.for_batches(head.chunking.batch_invariant)))
    else:
        total = function.sum(function.all_values(*of_rows(), target), target, mine.divisor)
    return DTensor.from_local(total, at.mesh, at.partial, run_check=False).redistribute(at.mesh, at.replicated)


def _part(tensor: Any, mesh: Any, places: list[Any], grad_places: list[Any]) -> Any:
    """The local tensor in these placements. Its gradient returns in others."""
    return None if tensor is None else tensor.redistribute(mesh, places).to_local(grad_placements=grad_places)
