"""Two backends for losses from hidden states: one reuses the logits' memory, one writes nodes of an exported graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels.options import Chunking
from .fp8 import Fp8Products
from .packing import ComputedRows, PaddedRows, counted_rows
from .products import Products, counting_kernels
from .sizes import rows_of_one_shape


class Backend(NamedTuple):
    """Chooses the rows to compute, and the class that computes logits and multiplies their gradients."""

    products: Callable[..., Any]  # takes the arguments of ``Products``
    rows: Callable[..., ComputedRows]  # takes the arguments of ``rows_to_compute``


def rows_to_compute(
    target: Tensor, ignore_index: int, chunking: Chunking, *heads: tuple[Tensor, Tensor]
) -> ComputedRows:
    """``heads``: (input (N, H), linear_weight) of each head."""
    if chunking.batch_invariant:
        input, linear_weight = heads[0]
        size_args = (linear_weight.shape[0], chunking.chunk_rows, chunking.logits_dtype)
        return PaddedRows(target, ignore_index, rows_of_one_shape(input, *size_args))
    if not chunking.skip_ignored:
        return ComputedRows(target)
    kernels = [counting_kernels(*head) for head in heads] if chunking.products is None else [None]
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
