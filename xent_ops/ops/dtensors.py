"""Tells DTensors from plain tensors, without importing torch.distributed."""

from __future__ import annotations

from torch import Tensor

from . import arguments


def is_dtensor(*tensors: Tensor | None) -> bool:
    """Is at least one of them a DTensor?"""
    found = [tensor for tensor in tensors if hasattr(tensor, "device_mesh")]
    for tensor in found:
        arguments.refuse_proxy(tensor)  # a proxy answers every attribute
    return len(found) > 0  # Dynamo of torch 2.11 does not trace bool() of a list


def refuse_dtensors(name: str, *tensors: Tensor) -> None:
    if is_dtensor(*tensors):
        raise NotImplementedError(
            f"{name} of DTensors is not supported. With FSDP2 (fully_shard) call it inside of the forward of the "
            "module that owns the weight, where that is a plain tensor; full_tensor() is right where every rank has "
            "the same rows, and to_local() where that has all classes. Of DTensors there are cross_entropy, "
            "linear_cross_entropy and linear_token_loss, and of a rank's part of the classes xent_ops.distributed has "
            "functions"
        )


def refuse_dtensor(name: str, tensor: Tensor, instead: str) -> None:
    if type(tensor) is not Tensor and hasattr(tensor, "device_mesh"):
        raise TypeError(f"{name} is a DTensor: pass {name}.to_local(), or call {instead}")
