"""A vocabulary that is split over ranks, in plain torch: a rank's packed statistics, and the join. See reference.py.

The loss of a row is linear in lse and x_t, so it is a sum of one part for each rank. Each rank r subtracts a number p_r
of its own (the maximum of its columns, so that large logits lose no digits)::

    part_r        = [t on r] w_t (1-e) (p_r - x_t) + (e/V) sum_{j on r} w_j (p_r - x_j)
    share_r       = [t on r] w_t (1-e)             + (e/V) sum_{j on r} w_j
    loss          = sum_r part_r + share_r (lse - p_r)
    lse           = P + log sum_r total_r exp(p_r - P),     total_r = sum_{j on r} exp(x_j - p_r),  P = max_r p_r
    lse_coefficient = sum_r share_r = d loss / d lse, for the gradient of reference.py

So a rank sends 3 numbers per row (p, total, part), and with class weights a fourth (w_t if it holds the target, else
0). It also sends one header: its first class, its number of classes, its sum of weights. From the headers follow
share_r and whether the shards tile the vocabulary. If they do not, every loss and lse is NaN. An integer of the header
is two digits in base 2^24, which float32 holds exactly. Columns after the last class are padding and are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .options import DEFAULTS, LossOptions, RowOptions
from .reductions import divisor_of, reduce_rows
from .reference import activation, columns_of, is_counted, split_lse, weights_at

HEADER = 5
DIGIT = 2**24


def width(rows: int, weighted: bool) -> int:
    """The number of values in the packed statistics of a rank."""
    return (4 if weighted else 3) * rows + HEADER


def cross_entropy_shard(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    batch_invariant: bool = False,
    *,
    options: RowOptions = DEFAULTS,
) -> Tensor:
    """(1, width): p, total, part and, with class weights, w_t of every row; then the header."""
    if batch_invariant:
        logits = logits.contiguous()  # the order of torch's sum follows the strides
        if target.numel() == 1:  # torch splits the sum of a single row over threads
            two = logits.reshape(1, -1).repeat(2, 1), target.reshape(1).repeat(2)
            packed = cross_entropy_shard(*two, class_start, num_classes, weight, options=options)
            return torch.cat([packed[:, :-HEADER:2], packed[:, -HEADER:]], 1)
    columns = columns_of(logits.shape[-1], class_start, num_classes)
    x = activation(logits[..., :columns], options)
    local = target.to(torch.int64) - class_start
    owned = (local >= 0) & (local < columns)
    column = torch.where(owned, local, 0)
    if columns == 0:
        maximum = x.new_full(target.shape, float("-inf"))
        x_target = torch.zeros_like(maximum)
    else:
        maximum = x.amax(-1)
        x_target = x.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    pivot = torch.where(maximum == float("-inf"), 0.0, maximum)
    distance = x - pivot.unsqueeze(-1)
    part = pivot - x_target
    rows = [maximum, distance.exp().sum(-1)]
    sum_weights = x.new_full((), columns)
    if weight is not None:
        weight = weight[:columns].to(x.dtype)
        target_weight = torch.where(owned, weights_at(weight, column) if columns else part, 0.0)
        part = part * target_weight
        sum_weights = weight.sum()
    part = torch.where(owned, part, 0.0)
    if options.label_smoothing > 0.0:
        smooth = (-distance if weight is None else -distance * weight).sum(-1)
        part = (1 - options.label_smoothing) * part + options.label_smoothing / num_classes * smooth
    rows.append(part)
    if weight is not None:
        rows.append(target_weight)
    return torch.cat([*(row.reshape(-1) for row in rows), header(class_start, columns, sum_weights)]).unsqueeze(0)


def header(class_start: int, columns: int, sum_weights: Tensor) -> Tensor:
    """(HEADER,): the range of a shard, and the sum of its weights, ()."""
    integers = [class_start // DIGIT, class_start % DIGIT, columns // DIGIT, columns % DIGIT]
    # Filled on the device, because a CUDA graph capture refuses copies from the host.
    return torch.cat([*(sum_weights.new_full((1,), integer) for integer in integers), sum_weights.reshape(1)])


def shard_ranges(headers: Tensor) -> tuple[Tensor, Tensor]:
    """(first class, number of classes) of each shard, (ranks,), from the headers, (ranks, HEADER)."""
    digits = headers[:, :4].to(torch.int64)
    return digits[:, 0] * DIGIT + digits[:, 1], digits[:, 2] * DIGIT + digits[:, 3]


def tiles(starts: Tensor, sizes: Tensor, num_classes: int) -> Tensor:
    """Do the shards tile [0, num_classes)? Each starts where no other does, at 0 or where another one ends."""
    filled = sizes > 0
    same = (filled & (starts.unsqueeze(-1) == starts)).sum(-1)
    before = (filled & (starts.unsqueeze(-1) == starts + sizes)).sum(-1)
    follows = (same == 1) & ((starts == 0) | (before > 0))
    return (~filled | follows).all() & (sizes.sum() == num_classes)


def sum_in_order(parts: Tensor) -> Tensor:
    """(ranks, ...) to (...), added up from the first to the last.

    torch's sum of five or more rows has an order that depends on the place in a row (on a CPU).
    """
    return functools.reduce(torch.add, parts.unbind())


def cross_entropy_shard_join(
    logits: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> tuple[Tensor, ...]:
    """(loss, lse, w_t, lse_coefficient, lse_low), each (...), from the statistics of all ranks.

    All but lse and lse_low are 0 where ignored.
    It gives the same bits on every rank, because it uses only gathered numbers. Pointwise except for sums over ranks.
    """
    shape, number = target.shape, target.numel()
    headers = gathered[:, -HEADER:]
    starts, sizes = shard_ranges(headers)
    tiled = tiles(starts, sizes, num_classes)
    numbers = gathered[:, :-HEADER].reshape(gathered.shape[0], 3 if weight is None else 4, number)
    maximum, total, part = numbers[:, 0], numbers[:, 1], numbers[:, 2]

    target = target.to(torch.int64).reshape(-1)
    top = maximum.amax(0)
    pivot = torch.where(top == float("-inf"), 0.0, top)
    log_total = sum_in_order(total * (maximum - pivot).exp()).log()
    if weight is None:
        first = starts.unsqueeze(-1)
        target_weight = ((target >= first) & (target < first + sizes.unsqueeze(-1))).to(maximum.dtype)
    else:
        target_weight = numbers[:, 3]
    share = target_weight
    if options.label_smoothing > 0.0:
        share = (1 - options.label_smoothing) * target_weight + options.label_smoothing / num_classes * headers[:, 4:]
    lse_coefficient = sum_in_order(share)
    distance = pivot - torch.where(maximum == float("-inf"), 0.0, maximum)
    # A shard without a share adds 0, even if the difference to its maximum overflows.
    loss = sum_in_order(part + torch.where(share == 0.0, 0.0, share * distance))
    loss = loss + lse_coefficient * log_total

    counted = is_counted(target, options.ignore_index)
    valid = (target >= 0) & (target < num_classes)
    loss = torch.where(counted, torch.where(valid & tiled, loss, float("nan")), 0.0)
    lse, lse_low = split_lse(pivot, log_total)
    lse = torch.where(tiled, lse, float("nan"))
    target_weight = torch.where(counted, sum_in_order(target_weight), 0.0)
    lse_coefficient = torch.where(counted, lse_coefficient, 0.0)
    rows = (loss, lse, target_weight, lse_coefficient, lse_low)
    return tuple(value.view(shape) for value in rows)


def cross_entropy_shard_reduced(
    logits: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    join: Callable[..., tuple[Tensor, ...]] = cross_entropy_shard_join,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, divisors, lse, lse_coefficient, lse_low): (), (2,) as in ``reductions.cross_entropy_reduced``, (...).

    ``join`` computes the rows.
    """
    shard = (gathered, class_start, num_classes, weight)
    loss, lse, target_weight, lse_coefficient, lse_low = join(logits, target, *shard, options=options)
    divisors = divisor_of(target_weight, target, options.ignore_index)
    value = reduce_rows(loss, lse, target, divisors, LossOptions(options, lse_square_scale, reduction)).value
    return value, divisors, lse, lse_coefficient, lse_low
