"""``shard=``: a head that is split over ranks, and the binding that all losses of hidden states share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ..head.loop import HeadSlice
from ..linear_call import LinearCall
from ..ops import arguments, checks, rules, transforms
from ..ops.dtensors import refuse_dtensor
from ..ops.library import OPERATORS, check_call_of
from ..ops.message_values import type_name
from . import consistency, parts
from .groups import Group, Ranks, ranks_of
from .pipelined import is_pipelined

_Record = TypeVar("_Record")
_ONE_WAY = "is of cross entropy and of token losses of one class a row: with a shard this loss has one way"


class Shard(NamedTuple):
    """The head's rows (classes) are split between the ranks of a group: ``shard=`` of a loss of hidden states.

    Every rank gets the same loss, bit for bit. Backward returns the gradient of its own rows of the head, and the whole
    gradient of its input. No rank has more than two chunks of its own logits.

    ``linear_weight`` is (classes of this rank, H): the rows of the head from ``class_start`` on. ``linear_bias``, class
    weights and a teacher's head have the same classes, on every rank or on none. Shards may differ in size and may be
    empty. Rows beyond ``num_classes`` are padding, with a gradient of 0. All other arguments are the same on every
    rank: targets are classes of the whole vocabulary, and each tensor requires grad on every rank or on none.

    Attributes:
        num_classes: the size of the whole vocabulary.
        group: the ranks that share the vocabulary, as for ``vocab_parallel_cross_entropy``. None: all ranks.
        class_start: the first class of this rank. None: the split is that of torch.chunk and of DTensor's Shard,
            ceil(num_classes / ranks) classes each, as long as there are any.
        sequence_parallel: the inputs are split evenly over the ranks along one dimension of the target, in the ranks'
            order: (S / ranks, B, H) or (B, S / ranks, H). They are gathered, and the input's gradient is
            reduce-scattered instead of all-reduced. All other tensors have all rows.
        pipelined: True: three matrix multiplications, two chunks of logits; a chunk's statistics are gathered while the
            next chunk's matrix multiplication runs, and the forward computes the gradients. False: four, one chunk; the
            backward computes the logits again. None: True if gradients of a mean or a sum are wanted, except with
            ``skip_ignored`` or ``products`` (True refuses both) and in an eager checkpoint. Inside a compiled
            checkpoint Inductor saves the gradients; pass False for another backend. A compiled graph unrolls the loop,
            so another number of chunks is another graph. All ranks must use the same way and the same ``chunk_rows``:
            weights and biases require grad on every rank or on none. Losses of several classes a row or of two heads
            have the first way alone.
        check: before anything is computed, compare the arguments of all ranks, as ``vocab_parallel_cross_entropy``
            does, but not the values of inputs. Every rank raises if one of them must. Not in compiled graphs.

    Errors are those of the loss and of ``vocab_parallel_cross_entropy``. Shards that do not tile the vocabulary give
    NaN on every rank, and so does a target out of range on a GPU. Arguments that differ between ranks give wrong
    numbers, unless ``check=True``. DTensors, second derivatives, torch.func and forward-mode AD are not supported.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> hidden, target = torch.randn(8, 16, requires_grad=True), torch.arange(8)
        >>> head = torch.nn.Linear(16, 1024 // world, bias=False)  # this rank's rows
        >>> shard = xent_ops.distributed.Shard(num_classes=1024)
        >>> xent_ops.linear_cross_entropy(hidden, head.weight, target, shard=shard).backward()
    """

    num_classes: int
    group: Group = None
    class_start: int | None = None
    sequence_parallel: bool = False
    pipelined: bool | None = None
    check: bool = False


def bind_over_ranks(name: str, shard: Any, bind: Callable[[Ranks], _Record]) -> tuple[_Record, Ranks]:
    """What ``bind`` returns, compared between the ranks if the shard says so, and the ranks."""
    if not isinstance(shard, Shard):
        raise TypeError(f"shard must be xent_ops.distributed.Shard(num_classes, ...) or None, got {type_name(shard)}")
    ranks = ranks_of(shard.group)
    return consistency.bind_and_compare(name, shard.group, ranks, lambda: bind(ranks), shard.check), ranks


def bind_shard(
    call: LinearCall, ranks: Ranks, shard: Shard, *, by_chunks: bool = False, reads_target: bool = True
) -> LinearCall:
    """Bind the call to this rank's classes. Raises all errors that this rank can detect.

    ``by_chunks``: the loop over chunks alone computes it. ``reads_target``: else only whether a row is ignored.
    """
    tensors = {"input": call.input, "linear_weight": call.head.weight, "linear_bias": call.head.bias}
    tensors |= {"target": call.target, "ids": call.ids, "token_weight": call.token_weight, "divisor": call.divisor}
    for argument, tensor in tensors.items():
        refuse_dtensor(argument, tensor, "xent_ops.linear_cross_entropy")
    checks.token_weight(call.token_weight, call.target)
    call = call.in_autocast_dtype()
    target, input, head = call.target, call.input, call.head
    _check_head(input, head)
    shard_range = parts.shard_range(head.weight.shape[0], shard.num_classes, shard.class_start, ranks)
    is_split = arguments.boolean("sequence_parallel", shard.sequence_parallel) and ranks.world > 1
    split = _split_dimension(input, target, ranks.world) if is_split else None
    if transforms.is_traced():  # the operators of chunks refuse the rest
        if split is None:
            checks.same_shape("target", target.shape, input.shape[:-1], "a class index for each row of the input")
    else:
        rows = input if split is None else input.new_empty(()).expand(*target.shape, input.shape[-1])  # its shape
        shard_args = (rows, head.weight, target, *shard_range, head.bias, head.class_weight)
        check_call_of("linear_cross_entropy_shard", *shard_args, **call.loss.row_options._asdict())
    if call.ids is not None:
        checks.refuse_products_of_ids(head.chunking.products)
        logits = input.new_empty(()).expand(*target.shape, shard_range[1])
        check_call_of("token_logits", logits, call.ids, **call.loss.row_options._asdict())
    if by_chunks and head.chunking.skip_ignored:
        raise NotImplementedError(f"skip_ignored=True {_ONE_WAY}, which computes all rows")
    if by_chunks and shard.pipelined is False:
        raise NotImplementedError(f"pipelined=False {_ONE_WAY}, which is pipelined")
    head = head._replace(shard_range=shard_range)
    call = call._replace(head=head, sequence_dim=split, pipelined=is_pipelined(shard.pipelined, input, head, call.loss))
    if reads_target:
        check_values(call, shard)
    return call


def _check_head(input: Tensor, head: HeadSlice) -> None:
    """Raise what its operators would, before anything is computed. A slice may be empty."""
    contract = OPERATORS["linear_cross_entropy_backward"].contract
    tensors = {"input": input, "linear_weight": head.weight, "linear_bias": head.bias}
    options = {"accumulate_dtype": head.accumulate_dtype, **head.chunking.keywords()}
    call = contract.blank(**tensors, num_classes=1, **options)
    contract.check_tensors(call)
    rules.chunking(call)


def check_values(call: LinearCall, shard: Shard, classes: Tensor | None = None) -> None:
    """Raise the errors that depend on the values of targets, ahead of the first collective: if the shard asks for that,
    or reading does not synchronise. ``classes``: a draft vocabulary.
    """
    if shard.check or transforms.can_read(call.target):
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
