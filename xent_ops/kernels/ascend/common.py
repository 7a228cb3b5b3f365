"""Shared by launchers: cores, device, targets, flags."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton import JITFunction

from ..options import RowOptions
from ..rows import dense
from ..triton.configs import softcap
from . import configs
from .forward import forward_kernel

Launcher = TypeVar("Launcher", bound=Callable[..., Any])
LAUNCHERS: dict[str, Callable[..., Any]] = {}  # by the name of the operator and of the function


def launcher(function: Launcher) -> Launcher:
    LAUNCHERS[function.__name__] = function
    return function


def _on_host(tensor: Tensor) -> bool:
    """Do the kernels run on the host: in Triton's interpreter, or on CPU tensors in the tests of their lowering?"""
    return tensor.device.type == "cpu" or not isinstance(forward_kernel, JITFunction)


def cores(tensor: Tensor) -> int:
    """Vector cores of the tensor's device; 3 on the host, so that programs have several rows there."""
    return 3 if _on_host(tensor) else configs.vector_cores(tensor.device)


def on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current: Triton launches on the current device."""
    if not _on_host(tensor):
        module = torch.get_device_module(tensor.device)
        if tensor.device.index != module.current_device():
            return module.device(tensor.device)
    return contextlib.nullcontext()


def launch(kernel: Any, rows: int, tensors: Sequence[Tensor], *numbers: Any, **constants: Any) -> None:
    """Launch one program a vector core, each with a chunk of the rows, on the device of the tensors."""
    programs, chunk = configs.programs(rows, cores(tensors[0]))
    with on(tensors[0]):
        kernel[(programs,)](*tensors, rows, chunk, *numbers, **constants)


def indices(target: Tensor) -> Tensor:
    """Class indices, one a row, of a dtype that a scalar load of the vector cores takes."""
    target = dense(target)
    return target.to(torch.int32) if target.dtype == torch.uint8 else target


def features(weight: Tensor | None, options: RowOptions, itemsize: int) -> dict[str, Any]:
    """The flags that all kernels have."""
    return {
        "HAS_WEIGHT": weight is not None,
        "HAS_SMOOTHING": options.label_smoothing > 0.0,
        "HAS_SCALE": options.logit_scale != 1.0,
        "SOFTCAP": softcap(options.softcap, itemsize),
    }
