"""One rank's rows of the head, by chunks of rows as in chunks.py: statistics, the join, one chunk at a time.

With entropies a rank hands over the lse l_r and the entropy H_r of its own columns, as statistics relative to p_r = l_r
(kernels/reference_shard.py), and the entropies after them. With the lse of all ranks::

    entropy = sum_r exp(l_r - lse) (H_r + lse - l_r)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import reference, reference_shard
from ..kernels.options import DEFAULTS, Chunking, Options
from ..kernels.reference_ids import Masked, gather, mask
from ..kernels.rows import front_of
from .chunks import as_rows, classes_of
from .ids import gradient
from .products import (
    InPlace,
    add_product,
    add_rows,
    counting_kernels,
    gradient_in,
    logits_of,
    zero_behind,
)
from .sizes import padded_classes
from .way import IN_MEMORY, Way

_ops = torch.ops.xent
_HEADER = reference_shard.HEADER
_UNREAD = (float("-inf"), 0.0, 0.0, 0.0)  # the statistics of a row that is skipped
_NOWHERE = -1  # the target of a row whose class is on another rank, or that is ignored


def width(rows: int, weighted: bool, with_entropy: bool, places: int = 0) -> int:
    """How many numbers a rank hands over."""
    return reference_shard.width(rows, weighted) + (rows if with_entropy else 0) + places * rows


def stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    way: Way = IN_MEMORY,
    **chunking: Any,
) -> Tensor:
    flat, how = as_rows(input), Chunking(**chunking)
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    rows = way.rows(target, options.ignore_index, how, (flat, head))
    columns = len(head)

    def visit(logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        return numbers(logits, target, class_start, num_classes, weight, with_entropy, options)

    if columns == 0:
        made: Sequence[Tensor] = visit(flat[:, :0], target.reshape(-1))
    else:
        made = way.products(rows, flat, head, bias, how).run(visit, rows.indices())
        made = [rows.give(values, otherwise) for values, otherwise in zip(made, _UNREAD, strict=False)]
    return handed_over(made, class_start, columns, weight, with_entropy)


def numbers(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None,
    with_entropy: bool,
    options: Options,
) -> Sequence[Tensor]:
    """Of rows of logits: the largest, the total relative to it, the part of the loss; then w_t or the entropy."""
    if not with_entropy:
        numbers = _ops.cross_entropy_shard(logits, target, class_start, num_classes, weight, **options.keywords())
        return numbers[0, :-_HEADER].view(3 if weight is None else 4, -1).unbind()
    if logits.shape[1] == 0:
        zeros = logits.new_zeros(target.shape, dtype=reference.accumulator(logits))
        return zeros - float("inf"), zeros, zeros, zeros
    here, keywords = _local_target(target, class_start, logits.shape[1], options)
    loss, lse, _, entropy = _ops.cross_entropy_forward(logits, here, None, False, True, **keywords)
    return lse, torch.ones_like(lse), loss, entropy


def handed_over(
    numbers: Sequence[Tensor], class_start: int, columns: int, weight: Tensor | None, with_entropy: bool
) -> Tensor:
    """(1, width): the numbers of rows, and a header before the entropies."""
    dtype = numbers[0].dtype
    sum_weights = numbers[0].new_full((), columns) if weight is None else weight.to(dtype).sum()
    header = reference_shard.header(class_start, columns, sum_weights)
    return torch.cat([*numbers[:3], header, *numbers[3:]] if with_entropy else [*numbers, header]).unsqueeze(0)


def _local_target(target: Tensor, class_start: int, columns: int, options: Options) -> tuple[Tensor, dict[str, Any]]:
    """The targets as columns of this rank, and the options of a row operator that takes them."""
    column = target.to(torch.int64) - class_start
    here = (column >= 0) & (column < columns) & reference.is_counted(target, options.ignore_index)
    return torch.where(here, column, _NOWHERE), options._replace(ignore_index=_NOWHERE).keywords()


def join(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    gathered_input: Tensor | None = None,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # for the backward
    group_name: str = "",  # likewise
    **chunking: Any,
) -> tuple[Tensor, ...]:
    # The join of rows reads no logits, only their shape.
    logits = input.new_empty(()).expand(*target.shape, linear_weight.shape[0])
    loss, lse, target_weight, coefficient, entropy, _ = joined(
        gathered, logits, target, (class_start, num_classes), weight, with_entropy, options
    )
    assert target_weight is not None and coefficient is not None
    if Chunking(**chunking).skip_ignored:
        ignored = ~reference.is_counted(target, options.ignore_index)
        lse = lse.masked_fill(ignored, float("inf"))
        entropy = entropy.masked_fill(ignored, 0.0) if with_entropy else entropy
    return loss, lse, target_weight, coefficient, entropy


class RowStatistics(NamedTuple):
    """What all ranks know of a row once they are joined, each of the target's shape."""

    loss: Tensor
    lse: Tensor
    target_weight: Tensor | None  # None: all classes are here
    coefficient: Tensor | None  # likewise
    entropy: Tensor  # (0,) where it is not wanted
    at_ids: Tensor | None = None  # (n, K): x of several classes a row, where they were asked for


def joined(
    gathered: Tensor,
    logits: Tensor,
    target: Tensor,
    shard_range: tuple[int, int | None],
    weight: Tensor | None,
    with_entropy: bool,
    options: Options,
    places: int = 0,  # ids of a row
) -> RowStatistics:
    """From what all ranks handed over. Of the logits the join reads the shape alone."""
    class_start, num_classes = shard_range
    if num_classes is None:
        loss, lse, *rest = gathered.unbind()
        entropy = rest[0] if with_entropy else loss.new_empty(0)
        return RowStatistics(loss, lse, None, None, entropy, gathered[-places:].t() if places else None)
    at_ids = None
    if places:
        last = gathered.shape[1] - places * target.numel()
        at_ids = gathered[:, last:].sum(0).view(places, -1).t()
        gathered = gathered[:, :last]
    number = target.numel() if with_entropy else 0
    of_ranks = gathered[:, : gathered.shape[1] - number]
    loss, lse, target_weight, coefficient = _ops.cross_entropy_shard_join(
        logits, target, of_ranks, class_start, num_classes, weight, **options.keywords()
    )
    entropy = gathered.new_empty(0)
    if with_entropy:
        of_rank, of_all = gathered[:, :number], lse.reshape(-1)
        share = (of_rank - of_all).exp()
        parts = share * (gathered[:, gathered.shape[1] - number :] + of_all - of_rank)
        entropy = torch.where(share == 0.0, 0.0, parts).sum(0).view(target.shape)
    return RowStatistics(loss, lse, target_weight, coefficient, entropy, at_ids)


# A chunk at a time, for loop.py; its logits (rows, padded_classes) live from the first to the last.


def chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int = 0,
    num_classes: int | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    with_entropy: bool = False,
    count: Tensor | None = None,
    after: Tensor | None = None,
    ids: Tensor | None = None,
    mask_ids: bool = False,
    logits_dtype: torch.dtype | None = None,
    *,
    options: Options = DEFAULTS,
    padded: Callable[..., Tensor] | None = None,
    place: InPlace = InPlace(),  # noqa: B008 (which holds nothing)
) -> tuple[Tensor, Tensor]:
    """(what ``joined`` takes of this rank, the logits). Rows behind the count may have logits of 0."""
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    logits = (padded or padded_logits)(input, head, bias, count, logits_dtype)
    columns, masked, at_ids = head.shape[0], None, None
    if ids is not None:
        at_ids = gather(logits[:, :columns], ids, class_start, num_classes, options)
        if mask_ids and columns > 0:
            masked = mask(logits[:, :columns], ids, class_start, num_classes, options)
            logits = place.scatter(logits, masked.column, masked.value)
    of_slice = (logits[:, :columns], target, class_start, num_classes, weight)
    return statistics_of_chunk(*of_slice, with_entropy, at_ids, masked, options), logits


def padded_logits(
    input: Tensor,
    head: Tensor,
    bias: Tensor | None,
    count: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """(rows, padded_classes)."""
    columns, dtype = head.shape[0], logits_dtype or input.dtype
    kernels = None if count is None or dtype != input.dtype else counting_kernels(input, head)
    new = input.new_empty if kernels is None else input.new_zeros
    logits = new((input.shape[0], padded_classes(columns, dtype)), dtype=dtype)
    of_classes = logits[:, :columns]
    if kernels is None:
        logits_of(input, head, bias, of_classes)
    else:
        kernels.logits(input, head, bias, count, of_classes)
    logits[:, columns:].zero_()  # the result of an operator holds nothing that nobody wrote
    return logits


def statistics_of_chunk(
    logits: Tensor,  # (n, columns)
    target: Tensor,
    class_start: int,
    num_classes: int | None,
    weight: Tensor | None,
    with_entropy: bool,
    at_ids: Tensor | None,
    masked: Masked | None,
    options: Options,
) -> Tensor:
    """What ``joined`` takes of this rank."""
    places = None if at_ids is None else at_ids.t()  # they come last
    if num_classes is None:
        loss, lse, _, entropy = _ops.cross_entropy_forward(
            logits, target, weight, False, with_entropy, **options.keywords()
        )
        lse = lse if masked is None else masked.lse(lse, logits.shape[1], options)
        rows = torch.stack([loss, lse, entropy] if with_entropy else [loss, lse])
        return rows if places is None else torch.cat([rows, places])
    of_slice = (logits, target, class_start, num_classes, weight)
    if with_entropy or masked is not None:
        made = numbers(*of_slice, True, options)
        if masked is not None:
            made = (masked.lse(made[0], logits.shape[1], options), *made[1:])
        made = made if with_entropy else made[:3]
        stats = handed_over(made, class_start, logits.shape[1], weight, with_entropy)
    else:
        stats = _ops.cross_entropy_shard(*of_slice, **options.keywords())
    return stats if places is None else torch.cat([stats, places.reshape(1, -1)], 1)


def chunk_grad_(
    logits: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    class_start: int = 0,
    num_classes: int | None = None,
    weight: Tensor | None = None,
    divisors: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    coefficient: Tensor | None = None,
    with_grad_input: bool = True,
    count: Tensor | None = None,
    after: Tensor | None = None,
    ids: Tensor | None = None,
    at_ids: Tensor | None = None,
    grad_ids: Tensor | None = None,
    mask_ids: bool = False,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> tuple[Tensor, Tensor]:
    head, _, weight, _ = classes_of(linear_weight, None, weight, class_start, num_classes)
    of_classes = logits[:, : head.shape[0]]
    dtype = None if logits.dtype == linear_weight.dtype else linear_weight.dtype
    if ids is not None and at_ids is not None and grad_ids is not None:
        given = (grad_ids, grad_lse, grad_entropy, of_classes, ids, at_ids, lse, entropy)
        of_slice: dict[str, Any] = {"class_start": class_start, "num_classes": num_classes, "grad_dtype": dtype}
        gradient(*given, options=options, **of_slice, place=InPlace(), mask_ids=mask_ids)
    else:
        rest = (weight, divisors, grad_entropy, entropy, coefficient, class_start, num_classes, dtype)
        _ops.cross_entropy_backward_(
            grad_loss, grad_lse, of_classes, target, lse, *rest, lse_square_scale=lse_square_scale, **options.keywords()
        )
    done, written = linear_weight.new_empty(0), gradient_in(of_classes, dtype)
    if not with_grad_input:
        return linear_weight.new_empty(0), done
    shape = (logits.shape[0], head.shape[1])
    counts = count is not None and dtype is None
    kernels = counting_kernels(logits.new_empty(()).expand(shape), head) if counts else None
    if kernels is None:
        return torch.mm(written, head), done
    assert count is not None
    grad_input = logits.new_zeros(shape)
    kernels.grad_input(of_classes, head, count, torch.arange(shape[0], device=logits.device), grad_input)
    return grad_input, done


def chunk_add_(
    grad_linear_weight: Tensor,
    grad_linear_bias: Tensor,
    grad_logits: Tensor,
    input: Tensor,
    columns: int,
    first: bool,
    count: Tensor | None = None,
) -> None:
    """A gradient of shape (0,) is not wanted. ``first``: what is there counts for nothing."""
    of_classes = front_of(grad_logits[:, :columns], input.dtype)
    if grad_linear_weight.dim() == 2:
        total = grad_linear_weight[:columns]
        counts = count is not None and grad_logits.dtype == input.dtype
        kernels = counting_kernels(input, total) if counts else None
        if kernels is None:
            add_product(total, of_classes.t(), input, first)
        else:
            kernels.grad_weight(of_classes, input, count, total, add=not first)
    if grad_linear_bias.numel() > 0:
        add_rows(grad_linear_bias[:columns], of_classes, first)
    if first:
        zero_behind(grad_linear_weight, grad_linear_bias, columns)
