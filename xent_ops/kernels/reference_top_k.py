"""The classes of a row with the largest logits, and the rank of its target. Plain torch, on every device.

The order is total, that of ``logits.sort(descending=True, stable=True)``: larger logits first (smaller ones with a
logit_scale below 0), equal ones by the smaller class, NaN before all numbers. So the ids and the rank of a row depend
on its logits alone, and ``ids[rank]`` is the target where the rank is below k. torch.topk leaves the order of equal
logits open, and in bfloat16 a third of all rows have equal logits at the k-th place.

A long row is read once: the largest of each block of b classes. The k best classes are in the k best blocks, because
each of these begins with a class that is before all classes of any other block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .options import DEFAULTS, RowOptions
from .reference import gather_target

_SORTED = 4096  # a row of so many numbers is sorted at once
_LONGEST_BLOCK = 1024  # as a tile of block_keys_kernel
_COLUMNS = 16384  # classes that are compared with the target's logit at a time


def top_k(
    logits: Tensor,
    k: int,
    target: Tensor | None = None,
    target_logit: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    largest: Callable[[Tensor, int, RowOptions], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(the k classes (..., k), the number of classes before the target (...) or (0,)) of logits (..., V)."""
    ids = (largest or _largest)(logits, k, options)
    if target is None:
        return ids, ids.new_empty(0)
    if target_logit is not None:  # the logits are a slice of the classes; the target may be any column
        return ids, _number_before(logits, target_logit.unsqueeze(-1), target.to(torch.int64), options)
    index, counted, invalid = gather_target(target, logits.shape[-1], options.ignore_index)
    number = _number_before(logits, logits.gather(-1, index.unsqueeze(-1)), index, options)
    return ids, torch.where(counted & ~invalid, number, -1)


def block_of(width: int, k: int) -> int:
    """Classes of a block, a power of two: about as many blocks as candidates, and at least k blocks."""
    return min(1 << ((width // max(k, 1)).bit_length() // 2), _LONGEST_BLOCK)


def topk(logits: Tensor, k: int, options: RowOptions) -> Tensor:
    """``_largest`` for exporters: ONNX has no stable sort, and its TopK has this order, except for NaN."""
    if options.is_increasing:  # a branch: torch.compile may make the scale a symbol
        return logits.topk(k).indices
    return logits.topk(k, largest=False).indices


def _largest(logits: Tensor, k: int, options: RowOptions) -> Tensor:
    width, block = logits.shape[-1], block_of(logits.shape[-1], k)
    if k == 0:
        return logits.new_empty((*logits.shape[:-1], 0), dtype=torch.int64)
    if width <= _SORTED or block < 4:
        ids = _sorted(logits if options.is_increasing else -logits)[..., :k]
        return ids.clone(memory_format=torch.contiguous_format)  # contiguous() leaves the strides of no rows
    blocks = width // block
    whole = logits[..., : blocks * block].unflatten(-1, (blocks, block))
    best = _sorted(whole.amax(-1) if options.is_increasing else -whole.amin(-1))[..., :k]
    place = torch.arange(width, device=logits.device)
    of_blocks = (best.sort(dim=-1).values * block).unsqueeze(-1) + place[:block]
    behind = place[blocks * block :].expand(*logits.shape[:-1], -1)
    candidates = torch.cat([of_blocks.flatten(-2), behind], -1)  # ascending, so that ties stay in order
    values = logits.gather(-1, candidates)
    return candidates.gather(-1, _sorted(values if options.is_increasing else -values)[..., :k])


def _sorted(values: Tensor) -> Tensor:
    # On CUDA a sort by bits puts NaN with a sign last, and may tell -0 from 0.
    one_kind = torch.where(values.isnan(), float("nan"), values) + 0.0
    return one_kind.sort(dim=-1, descending=True, stable=True).indices


def _number_before(logits: Tensor, own: Tensor, index: Tensor, options: RowOptions) -> Tensor:
    """(...): the columns before a class with this logit, (..., 1), and this column."""
    total = torch.zeros_like(index)
    for start in range(0, logits.shape[-1], _COLUMNS):
        part = logits[..., start : start + _COLUMNS]
        smaller_class = torch.arange(start, start + part.shape[-1], device=index.device) < index.unsqueeze(-1)
        better = part > own if options.is_increasing else part < own
        better = better | (part.isnan() & ~own.isnan())
        total = total + (better | (((part == own) | (part.isnan() & own.isnan())) & smaller_class)).sum(-1)
    return total
