"""Two backends of the heads' losses: logits in memory that is reused, or nodes of an exported graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels.options import Chunking
from .fp8 import Fp8Products
from .packing import ComputedRows, counted_rows
from .products import Products, counting_kernels


class Backend(NamedTuple):
    """Which rows are computed, and what makes and multiplies their logits."""

    products: Callable[..., Any]  # arguments as for ``Products``
    rows: Callable[..., ComputedRows]  # as ``rows_to_compute``


def rows_to_compute(
    target: Tensor, ignore_index: int, chunking: Chunking, *heads: tuple[Tensor, Tensor]
) -> ComputedRows:
    """``heads``: input (N, H) and linear_weight of each."""
    if not chunking.skip_ignored:
        return ComputedRows(target)
    plain = chunking.logits_dtype in (None, heads[0][0].dtype) and chunking.products is None
    kernels = [counting_kernels(*head) for head in heads] if plain else [None]
    return counted_rows(target, ignore_index, None if None in kernels else kernels[0])


def _products(
    rows: ComputedRows,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    chunking: Chunking,
    *gradient_args: Any,
) -> Products:
    kind = Products if chunking.products is None else Fp8Products
    return kind(rows, input, linear_weight, linear_bias, chunking, *gradient_args)


IN_MEMORY = Backend(_products, rows_to_compute)
