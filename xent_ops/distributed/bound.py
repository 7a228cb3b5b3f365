"""A call of a head split over ranks, as the operators take it: what all losses of hidden states over ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..linear_call import LinearCall
from ..one_shape import PaddedCall, Result
from ..ops import checks, transforms
from ..ops.dtensors import refuse_dtensor
from ..ops.library import refuse
from ..ops.linear import checks as linear_checks
from .groups import Ranks
from .parts import all_gather, shard_range_of_width
from .pipelined import is_pipelined

NAMES = ("weight_shard", "bias_shard")


def gathered_input(input: Tensor, target: Tensor, split: int | None, ranks: Ranks) -> tuple[Tensor | None, Tensor]:
    """(the inputs of all ranks, the target in their order), both (ranks, ...); where nothing is split, as they were."""
    if split is None:
        return None, target
    return all_gather(input.detach().unsqueeze(0).contiguous(), ranks), by_ranks(target, split, ranks)


def by_ranks(target: Tensor, split: int | None, ranks: Ranks) -> Tensor:
    """The target in the order of the ranks' inputs, (ranks, ...); where nothing is split, as it was."""
    if split is None:
        return target
    return target.unflatten(split, (ranks.world, -1)).movedim(split, 0).contiguous()


def as_target(value: Tensor, split: int | None) -> Tensor:
    """A value for each row in that order, (ranks, ...), in the target's own."""
    return value if split is None else value.movedim(0, split).flatten(split, split + 1)


def padded_call(call: LinearCall, ranks: Ranks) -> PaddedCall:
    split = call.sequence_dim
    parts = 1 if split is None else ranks.world
    return PaddedCall(
        call,
        ranks.world,
        parts,
        order=lambda values: by_ranks(values, split, ranks),
        back=lambda values: as_target(values, split),
    )


def computed(call: LinearCall, ranks: Ranks, compute: Callable[[LinearCall, Ranks], Result]) -> Result:
    """``compute``, with chunks of one shape where the call asks for them."""
    if not call.head.chunking.batch_invariant:
        return compute(call, ranks)
    return padded_call(call, ranks).compute(lambda padded: compute(padded, ranks))


def bind_shard(
    call: LinearCall,
    ranks: Ranks,
    pipelined: bool | None,
    num_classes: Any,
    class_start: Any,
    sequence_parallel: bool,
) -> LinearCall:
    """The call with the classes of this rank. Raises every error that it can detect, but for the values of targets."""
    for argument, tensor in (("input", call.input), ("weight_shard", call.head.weight), ("target", call.target)):
        refuse_dtensor(argument, tensor, "xent_ops.linear_cross_entropy")
    checks.token_weight(call.token_weight, call.target)
    call = call.in_autocast_dtype()
    target, input, head = call.target, call.input, call.head
    linear_checks.head(input, head.weight, head.bias, head.accumulate_dtype, head.chunking, True, NAMES)
    shard_range = shard_range_of_width(head.weight.shape[0], num_classes, class_start, ranks)
    split = _split_dimension(input, target, ranks.world) if sequence_parallel and ranks.world > 1 else None
    if not transforms.is_traced():  # else the operators check before anything runs
        rows = input if split is None else input.new_empty(()).expand(*target.shape, input.shape[-1])  # its shape
        shard_args = (rows, head.weight, target, *shard_range, head.bias, head.class_weight)
        refuse("linear_cross_entropy_shard", *shard_args, **call.loss.row_options._asdict())
    if call.ids is not None:
        checks.refuse_products_of_ids(head.chunking.products)
        logits = input.new_empty(()).expand(*target.shape, shard_range[1])
        refuse("token_logits", logits, call.ids, **call.loss.row_options._asdict())
    head = head._replace(shard_range=shard_range)
    three_products = is_pipelined(pipelined, input, head, call.loss)
    return call._replace(head=head, sequence_dim=split, pipelined=three_products)


def check_values(call: LinearCall) -> LinearCall:
    """Raises what depends on the values of targets."""
    classes = call.target if call.ids is None else call.ids
    checks.target_values(classes, call.head.shard_range[1], call.loss.row_options.ignore_index)
    return call


def _split_dimension(input: Tensor, target: Tensor, world: int) -> int:
    """The dimension of the target of which each rank's input has its share."""
    shape = input.shape[:-1]
    if len(shape) == target.dim():
        for dim in range(target.dim()):
            all_rows = (*shape[:dim], world * shape[dim], *shape[dim + 1 :])
            if all(size == expected for size, expected in zip(target.shape, all_rows, strict=True)):
                return dim
    raise ValueError(
        f"target has shape {tuple(target.shape)} and this rank's input {tuple(input.shape)}; with "
        f"sequence_parallel=True one dimension of the target must be {world} times as long as that of the input, and "
        "the others equal"
    )
