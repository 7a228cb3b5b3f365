"""Tensors as the launchers hand them to kernels: rows of any stride, and one value a row. Needs torch alone."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """A tensor (..., V) as rows of V elements; row i starts at (i // inner) * outer_stride + (i % inner) * stride."""

    tensor: Tensor
    number: int
    inner: int
    outer_stride: int
    stride: int


def rows(tensor: Tensor) -> Rows:
    """Merge the batch dimensions into at most two; a tensor that needs more, or has strided classes, is copied."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.contiguous()
    if tensor.dim() == 2:
        return Rows(tensor, tensor.shape[0], max(tensor.shape[0], 1), 0, tensor.stride(0))
    groups: list[list[int]] = []  # [size, stride], innermost first
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if groups and stride == groups[-1][0] * groups[-1][1]:
            groups[-1][0] *= size
        else:
            groups.append([size, stride])
    if len(groups) > 2:
        return rows(tensor.reshape(-1, tensor.shape[-1]))
    groups += [[1, 0]] * (2 - len(groups))
    (inner, stride), (outer, outer_stride) = groups
    return Rows(tensor, inner * outer, max(inner, 1), outer_stride, stride)


def dense(tensor: Tensor) -> Tensor:
    """One value a row, contiguous; a copy of N numbers where it is not."""
    if tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    return tensor.reshape(-1).contiguous()


def per_row(tensor: Tensor | None, absent: Tensor) -> tuple[Tensor, int]:
    """A tensor of one value a row and its stride: 0 for an expanded scalar, as the gradient of a sum is."""
    if tensor is None:
        return absent, 0
    if not any(tensor.stride()):
        return tensor, 0
    flat = tensor.reshape(-1)  # a view where one stride describes it
    return flat, flat.stride(0)


def class_weight(weight: Tensor | None, absent: Tensor) -> Tensor:
    """The class weights in the dtype of ``absent``, which stands for them where there are none."""
    return absent if weight is None else weight.to(absent.dtype).contiguous()
