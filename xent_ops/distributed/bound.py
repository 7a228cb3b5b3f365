"""A call of a head split over ranks, checked and as the operators take it: what linear.py and token_loss.py share."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..head.loop import HeadSlice
from ..kernels.options import LossOptions
from ..ops import arguments, checks, transforms
from ..ops.library import refuse
from ..ops.linear import checks as linear_checks
from ..ops.linear import composite
from .groups import Ranks
from .parts import all_gather, refuse_dtensor, shard_range_of_width
from .pipelined import chosen


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


class Bound(NamedTuple):
    """A call as the operators take it; consistency.py compares all of it."""

    target: Tensor
    input: Tensor
    head: HeadSlice
    loss: LossOptions
    divisor: Tensor | None
    sequence_dim: int | None  # the dimension of the target along which sequence_parallel splits the input
    pipelined: bool
    token_weight: Tensor | None
    ids: Tensor | None = None  # several classes a row
    target_probs: Tensor | None = None  # of these
    tail: bool = False


def bound_call(
    name: str,
    ranks: Ranks,
    pipelined: bool | None,
    input: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    class_weight: Any,
    num_classes: Any,
    class_start: Any,
    sequence_parallel: bool,
    options: tuple[Any, Any, Any, Any, Any, str],  # as arguments.loss_options takes them
    divisor: Any,
    token_weight: Any,
    accumulate_dtype: Any,
    *chunking: Any,
) -> Bound:
    """Raises every error that this rank can detect by itself, but for the values of targets."""
    transforms.refuse(f"xent_ops.distributed.{name}")
    names = ("weight_shard", "bias_shard")
    arguments.linear(input, linear_weight, target, linear_bias, class_weight, names=names)
    for argument, tensor in (("input", input), ("weight_shard", linear_weight), ("target", target)):
        refuse_dtensor(argument, tensor, "xent_ops.linear_cross_entropy")
    loss = arguments.loss_options(*options, input.dtype)
    divisor = arguments.divisor(divisor, input)
    linear_checks.reduced_by(divisor, input, loss.reduction)
    arguments.optional("token_weight", token_weight)
    checks.token_weight(token_weight, target)
    accumulate_dtype, how = arguments.chunks(accumulate_dtype, *chunking)
    checks.weight_without_grad(class_weight)
    input, linear_weight, linear_bias = composite.cast_for_autocast(input, linear_weight, linear_bias)
    linear_checks.head(input, linear_weight, linear_bias, accumulate_dtype, how, True, names)
    shard_range = shard_range_of_width(linear_weight.shape[0], num_classes, class_start, ranks)
    split = _split_dimension(input, target, ranks.world) if sequence_parallel and ranks.world > 1 else None
    if not transforms.is_traced():  # else the operators check before anything runs
        rows = input if split is None else input.new_empty(()).expand(*target.shape, input.shape[-1])  # its shape
        given = (rows, linear_weight, target, *shard_range, linear_bias, class_weight)
        refuse("linear_cross_entropy_shard", *given, **loss.rows._asdict())
    head = HeadSlice(linear_weight, linear_bias, class_weight, shard_range, accumulate_dtype, how)
    three_products = chosen(pipelined, input, head, loss)
    return Bound(target, input, head, loss, divisor, split, three_products, token_weight)


def checked_call(name: str, ranks: Ranks, pipelined: bool | None, *call: Any) -> Bound:
    """Raises what depends on values too."""
    bound = bound_call(name, ranks, pipelined, *call)
    checks.target_values(bound.target, bound.head.shard_range[1], bound.loss.rows.ignore_index)
    return bound


def _split_dimension(input: Tensor, target: Tensor, world: int) -> int:
    """The dimension of the target of which each rank's input has its share."""
    shape = input.shape[:-1]
    if len(shape) == target.dim():
        for dim in range(target.dim()):
            whole = (*shape[:dim], world * shape[dim], *shape[dim + 1 :])
            if all(size == wanted for size, wanted in zip(target.shape, whole, strict=True)):
                return dim
    raise ValueError(
        f"target has shape {tuple(target.shape)} and this rank's input {tuple(input.shape)}; with "
        f"sequence_parallel=True one dimension of the target must be {world} times as long as that of the input, and "
        "the others equal"
    )
