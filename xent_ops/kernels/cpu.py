"""The C++ kernels of csrc_meta for CPU tensors, loaded with the first tensor. Plain torch if they are not built."""

from __future__ import annotations

import ctypes
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .. import _extension


@functools.cache
def problem() -> str | None:
    """Why CPU tensors use plain torch; None if they use the C++ kernels."""
    if not _extension.MODULE.exists():
        return "this xent_ops was built without its C++ extension"
    sources = _extension.sources_hash()
    if sources not in (None, _extension.built_hash(_extension.MODULE)):
        return "the C++ extension was built from other sources than those beside it"
    try:
        importlib.import_module("._C", _extension.__package__)
    except ImportError as error:
        return f"the C++ extension cannot be loaded: {error}"
    return None


@functools.cache
def kernel(name: str) -> Callable[..., Any] | None:
    """The kernel of ``xent::name``. It also raises IndexError for a target out of range."""
    if problem() is None:
        found = getattr(torch.ops.xent_cpu, name, None)  # some operators have no C++ kernel
        return None if found is None else found.default
    if _extension.MODULE.exists():
        warnings.warn(
            f"xent_ops runs its slower plain-torch kernels on CPU tensors: {problem()}. This builds it again: "
            f"{_extension.build_command()}",
            stacklevel=2,
        )
    return None


def instruction_set() -> str:
    """The instruction set that the C++ kernels use on this processor: "avx512", "avx2" or "default"."""
    function = ctypes.CDLL(str(_extension.MODULE)).xent_ops_instruction_set
    function.restype = ctypes.c_char_p
    return function().decode()
