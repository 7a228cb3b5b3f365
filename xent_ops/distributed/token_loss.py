"""A user's function of each token's statistics where each rank holds some rows of the head.

Every rank calls the function after the join, on the same statistics of all tokens, and so gets the same bits. The
collectives are those of docs/distributed.md, with 4 numbers a row if the function reads entropies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..kernels.reference import accumulator
from ..linear_call import LinearCall, statistics_of_head
from ..ops import arguments, checks, transforms
from ..token_function import TokenFunction, loss_by_chunks
from ..user_function import DerivedRows, Function, UserFunction
from . import on_dtensors
from .bound import Shard, bind_over_ranks, bind_shard
from .groups import Ranks
from .parts import shard_range
from .pipelined import Collectives, arrange, is_pipelined
from .sharded_rows import sharded_rows


class _Bound(NamedTuple):
    """consistency.py compares all of it."""

    call: LinearCall
    function: TokenFunction


class _TopK(NamedTuple):
    call: LinearCall
    probs: Tensor
    tail: bool


def token_loss(shard: Shard, bind_call: Callable[[], LinearCall], fn: Function, rows: Any, check: bool) -> Tensor:
    def bind_function(ranks: Ranks) -> _Bound:
        call = bind_call()
        checks.reduction(call.loss.reduction, ("mean", "sum"))
        call = bind_shard(call, ranks, shard, by_chunks=call.ids is not None)
        if arguments.boolean("check", check) and call.ids is not None:
            raise NotImplementedError("check=True of fn is not supported with a shard and several classes a row")
        ignore_index = call.loss.row_options.ignore_index
        learned, dtype = (call.input, call.head.weight, call.head.bias), accumulator(call.input)
        return _Bound(call, TokenFunction(fn, rows, call.target, ignore_index, dtype, call.ids, learned=learned))

    (call, function), ranks = bind_over_ranks("linear_token_loss", shard, bind_function)
    return loss(call.as_sum(), function, ranks.for_batches(call.head.chunking.batch_invariant), check)


def top_k_distillation(
    shard: Shard, bind_call: Callable[[], LinearCall], bind_loss: Callable[..., Any], probs: Tensor, tail: bool
) -> Tensor:
    def bind_all(ranks: Ranks) -> _TopK:
        call = bind_call()
        checks.reduction(call.loss.reduction, ("mean", "sum"))
        return _TopK(bind_shard(call, ranks, shard, by_chunks=True), probs, tail)

    bound, ranks = bind_over_ranks("linear_top_k_distillation_loss", shard, bind_all)
    call, function = bind_loss(*bound)
    return loss(call, function, ranks.for_batches(call.head.chunking.batch_invariant))


def loss(call: LinearCall, function: DerivedRows, ranks: Ranks, check: bool = False) -> Tensor:
    ordered = arrange(call, function, ranks)

    def of_rows() -> tuple[Tensor, ...]:
        rows, entropy, low = sharded_rows(call, ranks, with_entropy=function.reads_entropy)
        return rows.loss, rows.lse, entropy, low

    if check and call.ids is None and isinstance(function, UserFunction):
        with torch.no_grad():
            function.check(*of_rows(), ordered)
    # In float16 each row's factor (head/float16.py) follows from the derivatives of all rows.
    if call.ids is None and not (call.pipelined and call.input.dtype != torch.float16):
        return function.counted_sum(function.all_values(*of_rows(), ordered), ordered, call.divisor)
    return loss_by_chunks(call, ordered, function, Collectives(ranks))


def of_dtensors(call: LinearCall, fn: Function, rows: Any, check: bool) -> Tensor:
    """``xent_ops.linear_token_loss`` of DTensors, a DTensor. ``fn`` sees the tokens of this rank."""
    call = on_dtensors.layout.placed(call).in_autocast_dtype()
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
    if transforms.can_read(target):  # the loop reads targets after its first collective, or never
        checks.target_values(target, at.num_classes, call.loss.row_options.ignore_index)
    # The loop adds up the input's gradient over the ranks that share the vocabulary.
    x = _part(input, at.mesh, at.rows, at.rows)
    w, b = (_part(tensor, at.mesh, at.of_head(at.replicated), at.of_head(at.partial)) for tensor in (weight, bias))
    head = call.head._replace(weight=w, bias=b, shard_range=shard_range(w.shape[0], at.num_classes, None, at.ranks))
    mine = call._replace(input=x, head=head, target=target).as_sum()
    if call.loss.reduction == "mean":
        mine = mine._replace(divisor=at.total(mine.divisor))  # type: ignore[arg-type]
    ignore_index = call.loss.row_options.ignore_index
    function = TokenFunction(fn, rows, target, ignore_index, accumulator(x), learned=(x, w, b))

    def of_rows() -> tuple[Tensor, ...]:
        values: Any = statistics_of_head(call, function.reads_entropy)
        return tuple([value.to_local() for value in values])

    if check:
        with torch.no_grad():
            function.check(*of_rows(), target)
    if is_pipelined(None, x, head, mine.loss) and x.dtype != torch.float16:
        total = loss_by_chunks(mine, target, function, Collectives(at.ranks.for_batches(head.chunking.batch_invariant)))
    else:
        total = function.counted_sum(function.all_values(*of_rows(), target), target, mine.divisor)
    return DTensor.from_local(total, at.mesh, at.partial, run_check=False).redistribute(at.mesh, at.replicated)


def _part(tensor: Any, mesh: Any, places: list[Any], grad_places: list[Any]) -> Any:
    """The local tensor in these placements. Its gradient returns in others."""
    return None if tensor is None else tensor.redistribute(mesh, places).to_local(grad_placements=grad_places)
