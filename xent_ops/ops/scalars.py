"""A plain int or float from a number of any kind: an option of a public function. Tensors on a GPU are not read."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import checks, transforms
from .message_values import repr_for_message


def is_int64(value: Any) -> bool:
    if type(value) is not int:
        return False
    if torch.compiler.is_compiling():  # to Dynamo a symbol is an int too, and its value may be unknown
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return guard_or_true(value >= -(2**63)) and guard_or_true(value < 2**63)
    return -(2**63) <= value < 2**63


def integer(name: str, value: Any) -> int:
    """A plain int from any integer in torch's sense (True is not one). Symbols are returned unchanged."""
    if is_int64(value) or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, Tensor):
        kind = value.dtype
        if kind.is_floating_point or kind.is_complex or kind == torch.bool or value.numel() != 1:
            raise TypeError(f"{name} must be an integer, got a tensor of shape {tuple(value.shape)} and dtype {kind}")
        _readable(name, value, "an integer")
    elif isinstance(value, (bool, float)):  # operator.index accepts bools, and Dynamo may not know a float's value
        found = type(value).__name__ if torch.compiler.is_compiling() else repr(value)
        raise TypeError(f"{name} must be an integer, got {found}")
    try:
        plain = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {repr_for_message(value)}") from None
    if not is_int64(plain):
        raise ValueError(f"{name} must fit into 64 bits, got {plain}")
    return plain


def at_least_one(name: str, value: Any) -> int:
    value = integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


_ROUNDED = "in bfloat16 that rounds them once more, each by up to .4 %"
_OF_TENSORS = {
    "logit_scale": (
        f". By a learned scale, or one a row, multiply the logits, or the hidden states of a head: {_ROUNDED}"
    ),
    "temperature": (
        f". By a learned temperature, or one a row, divide the logits, or the hidden states of both heads: {_ROUNDED}"
    ),
    "softcap": ". For a learned cap, or one a row, compute softcap * torch.tanh(logits / softcap) in torch",
    "lse_square_scale": ". For a learned z-loss, or one a row, take lse of xent_ops.cross_entropy_outputs",
    "label_smoothing": ". For learned targets, pass class probabilities",
}


def number(name: str, value: Any) -> float:
    """A plain float from any number. Symbols, and while tracing integers, are returned unchanged."""
    if type(value) is float:
        return value
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value}")
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        symbol: Any = value
        return symbol
    if isinstance(value, Tensor):
        instead = _OF_TENSORS.get(name.removeprefix("teacher_"), "")
        # Check this before reading the value: as a number it would silently lose its gradient or its tangent.
        if value.requires_grad or _transformed(value):
            raise RuntimeError(
                f"{name} is a tensor that requires grad or that torch.func transforms, but the loss has no derivative "
                f"for its options{instead}"
            )
        if value.numel() != 1 or value.dtype.is_complex:
            raise TypeError(
                f"{name} must be a number, got a tensor of shape {tuple(value.shape)} and dtype {value.dtype}{instead}"
            )
        _readable(name, value, "a number", instead)
    elif type(value) is int:
        if is_int64(value) and torch.compiler.is_compiling():
            return value  # may be a symbol; the operator's schema converts it to a float
    elif not (hasattr(value, "__float__") or hasattr(value, "__index__")):  # float() would read a string
        raise TypeError(f"{name} must be a number, got {repr_for_message(value)}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {repr_for_message(value)}") from None
    except OverflowError:
        raise ValueError(f"{name} must be at most {checks.FLOAT32_MAX}, got an integer beyond float64") from None


def _transformed(tensor: Tensor) -> bool:
    """Is this a tensor of torch.func, or one with a tangent? Dynamo has no tensors with hidden levels."""
    if torch.compiler.is_compiling():
        return False
    if transforms.is_wrapped(tensor):
        return True
    return transforms.dual_level() and forward_ad.unpack_dual(tensor).tangent is not None


def _readable(name: str, tensor: Tensor, what: str, instead: str = "") -> None:
    if torch.compiler.is_compiling():
        raise TypeError(f"{name} must be {what}, got a tensor, whose value a compiled graph cannot read{instead}")
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{name} must be {what}, got a tensor on {tensor.device}: to read it, the host would wait for the device. "
            f"Pass {name}.item() where that may be{instead}"
        )
