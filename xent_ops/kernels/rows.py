"""Tensors as the launchers hand them to kernels: rows of any stride, and one value a row. Needs torch alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """A tensor (..., V) as rows of V elements; row i starts at (i // inner) * outer_stride + (i % inner) * stride.

    Where one stride describes them, ``inner`` is 1: Triton compiles a kernel for that, without divisions.
    """

    tensor: Tensor
    number: int
    inner: int
    outer_stride: int
    stride: int


def dense_classes(tensor: Tensor) -> Tensor:
    """Copied, once for both kernels, where the last dimension is not dense; that of a transposed (B, S, V) is."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def rows(tensor: Tensor) -> Rows:
    """Merge the batch dimensions into at most two; a tensor that needs more, or has strided classes, is copied."""
    place = _place(tensor.shape, tensor.stride())
    if place is None:
        tensor = tensor.contiguous()
        place = _place(tensor.shape, tensor.stride())
        assert place is not None
    return Rows(tensor, *place)


@functools.lru_cache(1024)
def _place(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    number = math.prod(shape[:-1])
    if number == 0 or shape[-1] == 0:  # nothing there, and contiguous() would leave any strides as they are
        return number, 1, 0, 0
    if strides[-1] != 1 and shape[-1] > 1:
        return None
    groups: list[list[int]] = []  # [size, stride], innermost first
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if groups and stride == groups[-1][0] * groups[-1][1]:
            groups[-1][0] *= size
        else:
            groups.append([size, stride])
    if len(groups) > 2:
        return None
    if len(groups) == 2:
        (inner, stride), (_, outer_stride) = groups
        return number, inner, outer_stride, stride
    return number, 1, groups[0][1] if groups else shape[-1], 0  # one row: Triton's kernel for many will do


def dense_rows(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Where the rows of a dense tensor lie: the last three of ``Rows``."""
    return 1, shape[-1], 0


def dense(tensor: Tensor) -> Tensor:
    """One value a row, contiguous; a copy of N numbers where it is not."""
    if tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    return tensor.reshape(-1).contiguous()


# What comes of one tensor, and of all that are laid out like it, and how: decided once for all of them.


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def rows_like(tensor: Tensor, view: Rows) -> Callable[[Tensor], Tensor]:
    """The tensor of ``rows``, of which this is one's view."""
    return _as_it_is if view.tensor is tensor else _rows_tensor


def _rows_tensor(tensor: Tensor) -> Tensor:
    return rows(tensor).tensor


def dense_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """That of ``dense`` in memory, of any shape; converted, where a dtype is given."""
    if dtype is None or tensor.dtype == dtype:
        return _as_it_is if tensor.is_contiguous() else dense
    return lambda tensor: dense(tensor.to(dtype))


def per_row_like(tensor: Tensor | None) -> tuple[Callable[[Tensor], Tensor], int]:
    """For a tensor of one value a row, and its stride: 0 for an expanded scalar, as the gradient of a sum is."""
    if tensor is None or not any(tensor.stride()):
        return _as_it_is, 0
    if tensor.is_contiguous():
        return _as_it_is, 1
    return _flat, _flat(tensor).stride(0)


def _flat(tensor: Tensor) -> Tensor:
    """A view where one stride describes it."""
    return tensor.reshape(-1)


def per_row(tensor: Tensor | None, absent: Tensor) -> tuple[Tensor, int]:
    """A tensor of one value a row as kernels take it, and its stride."""
    way, stride = per_row_like(tensor)
    return absent if tensor is None else way(tensor), stride


def class_weight(weight: Tensor | None, absent: Tensor) -> Tensor:
    """The class weights in the dtype of ``absent``, which stands for them where there are none."""
    return absent if weight is None else weight.to(absent.dtype).contiguous()
