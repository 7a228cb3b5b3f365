"""Launcher of the k largest classes of a row; see launch.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from .. import reference_top_k
from ..options import DEFAULTS, RowOptions
from ..rows import optional_like
from ..sizes import size_hint
from .cached import Launch
from .common import Run, launcher, new_tensor, row_layout
from .top_k import block_keys_kernel, choose_kernel

# Columns of a tile, 8 a thread. 20 classes and a rank of 4096 x 128256 bfloat16: .60 ms, of 2048 .68 (H100, 2026-11).
_WIDTH = 1024
_MOST_CANDIDATES = 16384  # of one program
_MOST_ORDERED = 1024
# The highest bits of a key without the sign. Those of a 16-bit logit end in zeros.
_STEPS = {torch.bfloat16: 15, torch.float16: 18, torch.float32: 31}


@launcher
def top_k(
    logits: Tensor,
    k: int,
    target: Tensor | None = None,
    target_logit: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
) -> Run:
    classes, (number, strides, as_rows) = logits.shape[-1], row_layout(logits)
    if size_hint(number) == 0 or logits.dtype == torch.float64:
        return functools.partial(reference_top_k.top_k, options=options)
    block, order = reference_top_k.block_of(classes, k), {"INCREASING": options.is_increasing}
    blocks = -(-classes // block)
    by_kernels = 0 < k <= _MOST_ORDERED and max(blocks, k * block) <= _MOST_CANDIDATES
    new_ids = new_tensor((*logits.shape[:-1], k), torch.int64, logits.device)
    new_rank = new_tensor((0,) if target is None else logits.shape[:-1], torch.int64, logits.device)
    new_keys = new_tensor((number, blocks), torch.int32, logits.device)
    flags = {"WITH_RANK": target is not None, "OWN": target_logit is not None, "WIDTH": _WIDTH, "BLOCK": block}
    numbers = (classes, *strides, options.ignore_index)
    launch_keys = Launch(block_keys_kernel, number, *numbers, **order, **flags, num_warps=4, num_stages=3)
    if by_kernels:
        sizes = [next_power_of_2(size) for size in (blocks, k * block, k)]
        tiling = {"BLOCK": block, **dict(zip(("BLOCKS", "SIZE", "WIDTH"), sizes, strict=True))}
        largest = max(*sizes, 512)
        # Up to 8192 numbers are best in 4 warps, 16384 in 16. Of 4096 x 128256, k = 256 with the keys: .85 ms with 4
        # warps, 1.12 with 16; k = 1000: 2.96 and 1.65 (H200, 2026-11).
        warps = min(largest // 512, 4) if largest <= 8192 else 16
        tiling |= {"STEPS": _STEPS[logits.dtype], "num_warps": warps, "num_stages": 1}
        choose = Launch(choose_kernel, number, classes, k, *strides, **order, **tiling)
    as_target, as_own = optional_like(target), optional_like(target_logit)

    def run(logits: Tensor, k: int, target: Tensor | None = None, own: Tensor | None = None) -> Any:
        rows, keys, rank = as_rows(logits), new_keys(), new_rank()
        if by_kernels or target is not None:
            launch_keys(rows, as_target(target, keys), as_own(own, rows), keys, rank)
        if not by_kernels:
            return reference_top_k.top_k(logits, k, options=options)[0], rank
        ids = new_ids()
        choose(rows, keys, ids)
        return ids, rank

    return run
