"""Binds a call whose head is split over ranks: the part that all losses of hidden states share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..head.loop import HeadSlice
from ..linear_call import LinearCall
from ..ops import checks, rules, transforms
from ..ops.dtensors import refuse_dtensor
from ..ops.library import OPERATORS, refuse
from . import parts
from .groups import Ranks
from .pipelined import is_pipelined

NAMES = ("weight_shard", "bias_shard")
CALLED = dict(zip(("linear_weight", "linear_bias"), NAMES, strict=True))  # what callers call operators' arguments


def bind_shard(
    call: LinearCall,
    ranks: Ranks,
    pipelined: bool | None,
    num_classes: Any,
    class_start: Any,
    sequence_parallel: bool,
    check: bool = False,
) -> LinearCall:
    """Bind the call to this rank's classes. Raises all errors that this rank can detect.

    ``check``: also those that depend on the values of targets.
    """
    tensors = {"input": call.input, "weight_shard": call.head.weight, "bias_shard": call.head.bias}
    tensors |= {"target": call.target, "ids": call.ids, "token_weight": call.token_weight, "divisor": call.divisor}
    for argument, tensor in tensors.items():
        refuse_dtensor(argument, tensor, "xent_ops.linear_cross_entropy")
    checks.token_weight(call.token_weight, call.target)
    call = call.in_autocast_dtype()
    target, input, head = call.target, call.input, call.head
    _check_head(input, head)
    shard_range = parts.shard_range(head.weight.shape[0], num_classes, class_start, ranks)
    split = _split_dimension(input, target, ranks.world) if sequence_parallel and ranks.world > 1 else None
    if transforms.is_traced():  # the operators of chunks refuse the rest
        if split is None:
            checks.same_shape("target", target.shape, input.shape[:-1], "a class index for each row of the input")
    else:
        rows = input if split is None else input.new_empty(()).expand(*target.shape, input.shape[-1])  # its shape
        shard_args = (rows, head.weight, target, *shard_range, head.bias, head.class_weight)
        refuse("linear_cross_entropy_shard", *shard_args, **call.loss.row_options._asdict())
    if call.ids is not None:
        checks.refuse_products_of_ids(head.chunking.products)
        logits = input.new_empty(()).expand(*target.shape, shard_range[1])
        refuse("token_logits", logits, call.ids, **call.loss.row_options._asdict())
    head = head._replace(shard_range=shard_range)
    three_products = is_pipelined(pipelined, input, head, call.loss)
    call = call._replace(head=head, sequence_dim=split, pipelined=three_products)
    if check:
        check_values(call)
    return call


def _check_head(input: Tensor, head: HeadSlice) -> None:
    """Raise what its operators would, before anything is computed, by the caller's names. A slice may be empty."""
    contract = OPERATORS["linear_cross_entropy_backward"].contract
    tensors = {"input": input, "linear_weight": head.weight, "linear_bias": head.bias}
    options = {"accumulate_dtype": head.accumulate_dtype, **head.chunking.keywords()}
    call = contract.blank(**tensors, num_classes=1, **options)
    contract.check_tensors(call, CALLED)
    rules.chunking(call)


def check_values(call: LinearCall, classes: Tensor | None = None) -> None:
    """Raise the errors that depend on the values of targets. ``classes``: a draft vocabulary."""
    number, ignore_index = call.head.shard_range[1], call.loss.row_options.ignore_index
    checks.index_values(call.target, call.ids, classes, number, ignore_index)


def _split_dimension(input: Tensor, target: Tensor, world: int) -> int:
    """The dimension of the target along which the ranks' inputs are split."""
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
