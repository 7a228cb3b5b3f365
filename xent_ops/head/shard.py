"""One rank's rows of the head, by chunks of rows as in chunks.py: statistics, the join, one chunk at a time.

With entropies a rank hands over the lse l_r and the entropy H_r of its own columns, as statistics relative to p_r = l_r
(kernels/reference_shard.py), and the entropies after them. With the lse of all ranks::

    entropy = sum_r exp(l_r - lse) (H_r + lse - l_r)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reference, reference_shard
from ..kernels.options import DEFAULTS, Chunking, Options
from .chunks import as_rows, classes_of
from .products import Products, add_product, add_rows, logits_of, rows_to_compute, zero_behind
from .sizes import padded_classes

_ops = torch.ops.xent
_HEADER = reference_shard.HEADER
_UNREAD = (float("-inf"), 0.0, 0.0, 0.0)  # the statistics of a row that is skipped
_NOWHERE = -1  # the target of a row whose class is on another rank, or that is ignored


def width(rows: int, weighted: bool, entropy: bool) -> int:
    """How many numbers a rank hands over."""
    return reference_shard.width(rows, weighted) + (rows if entropy else 0)


def stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    **chunking: Any,
) -> Tensor:
    flat, how, dtype = as_rows(input), Chunking(**chunking), reference.accumulator(input)
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    rows = rows_to_compute(target, flat, head, options, how)  # of an empty shard too: all ranks raise, or none
    indices, shard, each = rows.indices(), (class_start, num_classes, weight), 3 if weight is None else 4
    if entropy:
        indices, keywords = _local_target(indices, class_start, len(head), options)
        each = 4
    else:
        keywords = options.keywords()
    # The largest logit, the total relative to it, the part of the loss; then w_t or the entropy.
    made = flat.new_full((each, rows.number), 0.0, dtype=dtype)
    made[0] = float("-inf")
    products = Products(rows, flat, head, bias, how.chunk_rows)
    for chunk, logits in products.chunks() if len(head) > 0 else ():
        if entropy:
            made[1, chunk] = 1.0
            values = _ops.cross_entropy_forward(logits, indices[chunk], None, False, True, **keywords)
            made[2, chunk], made[0, chunk], _, made[3, chunk] = values
        else:
            part = _ops.cross_entropy_shard(logits, indices[chunk], *shard, **keywords)[0, :-_HEADER]
            made[:, chunk] = part.view(each, -1)
    given = [rows.give(values, otherwise) for values, otherwise in zip(made, _UNREAD, strict=False)]
    sum_weights = made.new_full((), len(head)) if weight is None else weight.to(dtype).sum()
    header = reference_shard.header(class_start, len(head), sum_weights)
    numbers = [*given[:3], header, *given[3:]] if entropy else [*given, header]
    return torch.cat(numbers).unsqueeze(0)


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
    entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # for the backward
    group_name: str = "",  # likewise
    **chunking: Any,
) -> tuple[Tensor, ...]:
    # The join of rows reads no logits, only their shape.
    logits = input.new_empty(()).expand(*target.shape, linear_weight.shape[0])
    number = target.numel() if entropy else 0
    of_ranks = gathered[:, : gathered.shape[1] - number]
    shard = (of_ranks, class_start, num_classes, weight)
    loss, lse, target_weight, coefficient = _ops.cross_entropy_shard_join(logits, target, *shard, **options.keywords())
    entropies = gathered.new_empty(0)
    if entropy:
        of_rank, of_all = gathered[:, :number], lse.reshape(-1)
        share = (of_rank - of_all).exp()
        parts = share * (gathered[:, gathered.shape[1] - number :] + of_all - of_rank)
        entropies = torch.where(share == 0.0, 0.0, parts).sum(0).view(target.shape)
    if Chunking(**chunking).skips:
        ignored = ~reference.is_counted(target, options.ignore_index)
        lse = lse.masked_fill(ignored, float("inf"))
        entropies = entropies.masked_fill(ignored, 0.0) if entropy else entropies
    return loss, lse, target_weight, coefficient, entropies


# A chunk at a time, between collectives; its logits (rows, padded_classes) live from the first to the last.


def chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
) -> tuple[Tensor, Tensor]:
    """(its statistics, its logits)."""
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    logits = input.new_empty((input.shape[0], padded_classes(head.shape[0], input.dtype)))
    of_classes = logits[:, : head.shape[0]]
    logits_of(input, head, bias, of_classes)
    logits[:, head.shape[0] :].zero_()  # the result of an operator holds nothing that nobody wrote
    shard = (class_start, num_classes, weight)
    return _ops.cross_entropy_shard(of_classes, target, *shard, **options.keywords()), logits


def chunk_grad_(
    logits: Tensor,
    gathered: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    after: Tensor | None = None,
    with_grad_input: bool = True,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> tuple[Tensor, ...]:
    """``after`` is not read: it keeps the next chunk's product in front of this, whatever reorders a graph."""
    head, _, weight, _ = classes_of(linear_weight, None, weight, class_start, num_classes)
    of_classes, keywords, shard = logits[:, : head.shape[0]], options.keywords(), (class_start, num_classes)
    loss, lse, target_weight, coefficient = _ops.cross_entropy_shard_join(
        of_classes, target, gathered, *shard, weight, **keywords
    )
    rest = (weight, divisor, None, None, None if weight is None else coefficient, *shard)
    _ops.cross_entropy_backward_(
        lse.new_ones(()), None, of_classes, target, lse, *rest, lse_square_scale=lse_square_scale, **keywords
    )
    grad_input = torch.mm(of_classes, head) if with_grad_input else logits.new_empty(0)
    return loss, lse, target_weight, grad_input


def chunk_add_(
    grad_linear_weight: Tensor, grad_linear_bias: Tensor, grad_logits: Tensor, input: Tensor, columns: int, first: bool
) -> None:
    """A gradient of shape (0,) is not wanted. ``first``: what is there counts for nothing."""
    of_classes = grad_logits[:, :columns]
    if grad_linear_weight.dim() == 2:
        add_product(grad_linear_weight[:columns], of_classes.t(), input, first)
    if grad_linear_bias.numel() > 0:
        add_rows(grad_linear_bias[:columns], of_classes, first)
    if first:
        zero_behind(grad_linear_weight, grad_linear_bias, columns)
