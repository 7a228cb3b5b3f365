"""A CUDA device for Triton that launches nothing. Binding, keys and compilation are Triton's own.

It is for measuring the host time of a launch, and for testing launches, on a machine without a GPU.
"""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)
LAUNCHED: list[tuple[str, tuple[int, ...], list[Any]]] = []  # (kernel, grid, arguments), written by RecordingDriver


class Driver:
    class launcher_cls:
        def __init__(self, source: Any, metadata: Any) -> None:
            pass

        def __call__(self, *args: Any) -> None:
            pass

    utils = types.SimpleNamespace(
        load_binary=lambda *args: (object(), object(), 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )

    def get_current_device(self) -> int:
        return 99  # no real GPU has it, because kernels compiled here cannot run

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


class RecordingDriver(Driver):
    class launcher_cls:
        def __init__(self, source: Any, metadata: Any) -> None:
            self.name = metadata.name

        def __call__(self, *args: Any) -> None:
            values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args[9:]]
            LAUNCHED.append((self.name, args[:3], values))
