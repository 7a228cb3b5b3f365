"""Decides whether an operator may overwrite a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def may_be_written(name: str, tensor: Tensor) -> None:
    """Check a tensor that an operator overwrites with values that have no derivative."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} must not require grad, for an operator that has no derivative writes over it: call the operator "
            "under torch.no_grad(), or use xent_ops.cross_entropy(..., inplace_backward=True)"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name} was made in inference mode, and outside it no tensor of inference mode is written to: call the "
            f"operator under torch.inference_mode(), or pass {name}.clone()"
        )


def writable(name: str, tensor: Tensor) -> None:
    """Refuse tensors whose elements share memory."""
    if may_overlap(tensor.shape, tensor.stride()):
        raise RuntimeError(
            f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} share memory between their "
            "rows, so that no gradient can be written over them: pass a copy"
        )


def may_overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Do elements share memory, or are the strides too unusual to tell?"""
    if 0 in sizes:
        return False
    behind = 0  # offset of the last element of the dimensions with smaller strides
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= behind:
                return True
            behind += (size - 1) * stride
    return False
