"""Tensors in the forms that kernels take: rows of any stride, and one value per row. Imports torch only."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .sizes import statically_true, symbolic


class RowView(NamedTuple):
    """A tensor (..., V) as rows of V elements; row i starts at (i // inner) * outer_stride + (i % inner) * stride.

    If one stride describes them, ``inner`` is 1: Triton then compiles a kernel without divisions.
    """

    tensor: Tensor
    number: int
    inner: int
    outer_stride: int
    stride: int


def dense_classes(tensor: Tensor) -> Tensor:
    """A copy if the last dimension is not dense, shared by forward and backward. A transposed (B, S, V) is dense."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def reads_apart(tensor: Tensor) -> bool:
    """Do the C++ kernels of class indices read these classes at any stride? kFewClasses of csrc_meta/cpu/kernels.h."""
    return tensor.device.type == "cpu" and statically_true(tensor.shape[-1] <= 64)


def rows(tensor: Tensor) -> RowView:
    """Merge the batch dimensions into at most two. A tensor that needs more, or has strided classes, is copied."""
    layout = _layout_of(tensor)
    if layout is None:
        tensor = tensor.contiguous()
        layout = _layout_of(tensor)
        assert layout is not None
    return RowView(tensor, *layout)


def _layout_of(tensor: Tensor) -> tuple[int, int, int, int] | None:
    layout = _layout.__wrapped__ if _symbolic(tensor) else _layout  # symbols have no hash
    return layout(tensor.shape, tensor.stride())


def _symbolic(tensor: Tensor) -> bool:
    return any(map(symbolic, (*tensor.shape, *tensor.stride())))


def _contiguous(tensor: Tensor) -> bool:
    """Contiguous for every size of the range? A size that was 1 while tracing says nothing about its stride."""
    if not _symbolic(tensor):
        return tensor.is_contiguous()
    dense = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not (statically_true(size == 1) or statically_true(stride == dense)):
            return False
        dense *= size
    return True


@functools.lru_cache(1024)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    number = math.prod(shape[:-1])
    if statically_true(number == 0) or shape[-1] == 0:  # empty: contiguous() would not change the strides
        return number, 1, 0, 0
    if strides[-1] != 1 and shape[-1] > 1:
        return None
    groups: list[list[int]] = []  # [size, stride], innermost first
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if statically_true(size == 1):
            continue
        if groups and statically_true(stride == groups[-1][0] * groups[-1][1]):
            groups[-1][0] *= size
        else:
            groups.append([size, stride])
    if len(groups) > 2:
        return None
    if len(groups) == 2:
        (inner, stride), (_, outer_stride) = groups
        return number, inner, outer_stride, stride
    return number, 1, groups[0][1] if groups else shape[-1], 0  # a single row uses the kernel for many


def dense_rows(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The last three fields of ``RowView`` for a dense tensor."""
    return 1, shape[-1], 0


def front_of(logits: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The memory of a gradient in this dtype over the logits. A narrower gradient uses the front of each row."""
    if dtype is None or not is_narrower(dtype, logits):
        return logits
    return logits.view(dtype)[..., : logits.shape[-1]]


def first_columns(rows: Tensor, number: int) -> Tensor:
    """``rows[:, :number]``. A view takes the host some microseconds: none is made of all columns."""
    return rows if statically_true(rows.shape[1] == number) else rows[:, :number]


def is_narrower(dtype: torch.dtype | None, logits: Tensor) -> bool:
    """ops/checks.py allows only the logits' dtype and narrower ones."""
    return dtype is not None and dtype != logits.dtype


def dense(tensor: Tensor) -> Tensor:
    """One value per row, contiguous and flat. It copies N numbers if necessary."""
    if tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    return tensor.reshape(-1).contiguous()


# These functions look at one tensor and return a function that converts any tensor of the same shape, strides and
# dtype. So a launcher decides once, in its first stage.


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def rows_like(tensor: Tensor, view: RowView) -> Callable[[Tensor], Tensor]:
    """``rows(tensor).tensor`` for tensors like this one, whose rows are ``view``."""
    return _as_it_is if view.tensor is tensor else lambda tensor: rows(tensor).tensor


def dense_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """A contiguous tensor with the same values in the same order, in ``dtype`` if that is not None."""
    convert = _as_it_is if _contiguous(tensor) else _cloned if _symbolic(tensor) else dense
    if dtype is None or tensor.dtype == dtype:
        return convert
    return lambda tensor: convert(tensor.to(dtype))


def optional_like(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Callable[[Any, Tensor], Tensor]:
    """``dense_like`` for an argument that may be None: ``convert(argument, absent)`` is then ``absent``."""
    if tensor is None:
        return lambda _none, absent: absent
    convert = dense_like(tensor, dtype)
    return lambda tensor, _absent: convert(tensor)


def _cloned(tensor: Tensor) -> Tensor:
    """``dense``, for a traced size that would decide whether it copies."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1)


def per_row_like(tensor: Tensor | None) -> tuple[Callable[[Tensor], Tensor], int]:
    """(conversion, stride) for one value per row. The stride of an expanded scalar, such as a sum's gradient, is 0."""
    if tensor is None or all(statically_true(stride == 0) for stride in tensor.stride()):
        return _as_it_is, 0
    if _contiguous(tensor):
        return _as_it_is, 1
    return (_cloned, 1) if _symbolic(tensor) else (_flat, _flat(tensor).stride(0))


def _flat(tensor: Tensor) -> Tensor:
    """Flat: a view if one stride describes it, else a copy."""
    return tensor.reshape(-1)


def per_row(tensor: Tensor | None, absent: Tensor) -> tuple[Tensor, int]:
    """(one value for each row in the form that kernels take, its stride). ``absent`` replaces None."""
    convert, stride = per_row_like(tensor)
    return absent if tensor is None else convert(tensor), stride


def class_weight(weight: Tensor | None, absent: Tensor) -> Tensor:
    """The class weights in the dtype of ``absent``; ``absent`` itself replaces None."""
    return absent if weight is None else weight.to(absent.dtype).contiguous()


def padded_classes(classes: int, dtype: torch.dtype) -> int:
    """The columns of a row of logits in memory. Each row starts at a multiple of 128 bytes.

    cuBLAS' fast products need multiples of 16. With 128, the boundaries of kernels/triton/configs.py (edges) are at the
    same columns in every row, and so a row's bits do not depend on its place. The rule does not look at the number of
    classes: where that is symbolic, a graph would be compiled twice.

    On a CPU the columns behind the classes must hold zeros. With AMX, oneDNN multiplies bfloat16 values there by zero,
    and NaN times zero is NaN (https://github.com/uxlfoundation/oneDNN/issues/5717).
    """
    step = 128 // dtype.itemsize
    return -(-classes // step) * step
