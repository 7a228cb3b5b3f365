"""The k largest classes of each row and the rank of its target, as several classes a row: from a head by chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.options import DEFAULTS, Chunking, RowOptions
from ..kernels.reference import is_counted
from . import ids as head_ids
from .backend import IN_MEMORY, Backend
from .chunks import as_rows, unpack_statistics


def choose(logits: Tensor, k: int, target: Tensor | None, options: RowOptions) -> tuple[Tensor, Tensor]:
    """(ids, rank of the target or (0,)). The ids are k classes, and behind them the target; -100 in ignored rows."""
    order_options = {"ignore_index": options.ignore_index, "logit_scale": options.logit_scale}
    ids, rank = torch.ops.xent.top_k(logits, k, target, **order_options)
    if target is None:
        return ids, rank
    index = target.to(torch.int64).unsqueeze(-1)
    ids = torch.cat([ids, index], -1)
    return torch.where(is_counted(index, options.ignore_index), ids, DEFAULTS.ignore_index), rank


def of_ids(options: RowOptions) -> RowOptions:
    """The options of chosen ids: the target's ignore_index may be a class, and one of them."""
    return options._replace(ignore_index=DEFAULTS.ignore_index)


def linear_top_k(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    target: Tensor | None = None,
    linear_bias: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,  # only the backward uses it
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> tuple[Tensor, ...]:
    """(x of the ids (..., k or k + 1), the ids, lse, entropy, rank, lse_low) of a head's logits."""
    flat, chunking, with_rank = as_rows(input), Chunking(**fields), target is not None
    if target is None:  # every row counts
        target = input.new_full(input.shape[:-1], 0 if options.ignore_index else 1, dtype=torch.int64)
    rows = backend.rows(target, options.ignore_index, chunking, (flat, linear_weight))
    products = backend.products(rows, flat, linear_weight, linear_bias, chunking)

    def visit(logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        ids, rank = choose(logits, k, target if with_rank else None, options)
        at_ids, lse, entropy, low = head_ids.token_logits(logits, ids, True, options=of_ids(options))
        return at_ids, ids, lse, entropy, rank, low

    computed = products.run(visit, rows.indices())
    fills = (0.0, DEFAULTS.ignore_index, math.inf, 0.0, -1 if with_rank else None, 0.0)
    ignored = options.ignore_index if chunking.skip_ignored else None
    return tuple(unpack_statistics(rows, computed, fills, target, ignored))
