"""Tells DTensors from plain tensors, without importing torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import arguments, transforms


def is_dtensor(*tensors: Any) -> bool:
    """Is at least one of them a DTensor?"""
    for tensor in tensors:
        if hasattr(tensor, "device_mesh"):
            arguments.refuse_proxy(tensor)  # a proxy answers every attribute
            return True
    return False


def locals_of(primary: Tensor, *others: Tensor | None) -> list[Tensor]:
    """The local tensors of DTensors, or none if the primary is plain.

    A node saves them too: a write to a DTensor does not change the version of its local tensor, and vice versa.
    """
    if type(primary) is Tensor or not is_dtensor(primary) or transforms.is_recorded():
        return []
    tensors: Any = (primary, *others)
    return [tensor._local_tensor for tensor in tensors if is_dtensor(tensor)]


def takes_rows(dtype: torch.dtype, skip_ignored: bool, products: str | None) -> bool:
    """Does a reduced loss of a DTensor head take four products? The open loop has no such chunks.

    In float16 a gradient's factor (head/float16.py) would follow from the rows of all ranks.
    """
    return dtype == torch.float16 or skip_ignored or products is not None


def only_plain_tensors(name: str, *tensors: Any) -> None:
    """Refuse DTensors and transforms. ``tensors``: all arguments of the call that may be tensors."""
    transforms.refuse(name)
    if is_dtensor(*[one for one in tensors if not isinstance(one, float)]):  # hasattr would specialise a symbol
        raise NotImplementedError(not_of_dtensors(name))


def refuse_in_transforms(*tensors: Any) -> None:
    """Refuse DTensors of a call inside torch.func, which wraps them: their operators see no DTensor."""
    if is_dtensor(*[transforms.innermost(one) for one in tensors if isinstance(one, Tensor)]):
        raise NotImplementedError(
            "a loss of DTensors inside a functorch transform (torch.func) is not supported: take its gradient by "
            "torch.autograd.grad or backward(), or pass plain tensors, full_tensor()"
        )


def not_of_dtensors(name: str) -> str:
    return (
        f"{name} of DTensors is not supported. With FSDP2 (fully_shard) call it inside of the forward of the "
        "module that owns the weight, where that is a plain tensor; full_tensor() is right where every rank has "
        "the same rows, and to_local() where that has all classes. Of DTensors there are cross_entropy, "
        "token_log_probs, linear_cross_entropy, linear_token_log_probs and linear_token_loss, and of a rank's part "
        "of the classes xent_ops.distributed has functions"
    )


def refuse_beside_plain(plain: str, **tensors: Any) -> None:
    """Refuse DTensors among these. ``plain``: what is not one, and the verb."""
    for name, value in tensors.items():
        if is_dtensor(value):
            raise TypeError(
                f"{name} is a DTensor but {plain} not: pass a plain tensor, {name}.full_tensor() for all of it or "
                f"{name}.to_local() for this rank's part, or DTensors for all"
            )


def refuse_dtensor(name: str, tensor: Tensor | None, instead: str) -> None:
    if type(tensor) is not Tensor and hasattr(tensor, "device_mesh"):
        raise TypeError(f"{name} is a DTensor: pass {name}.to_local(), or call {instead}")
