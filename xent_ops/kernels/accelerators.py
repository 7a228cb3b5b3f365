"""The types of GPU that our Triton kernels serve, a record each. Another one (XPU) is another record here.

torch alone is imported. AMD's GPUs are "cuda" to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch


class Accelerator(NamedTuple):
    type: str  # of its torch.device
    key: str  # of the dispatcher
    current: Callable[[], int]  # the device that launches go to
    on: Callable[[int], AbstractContextManager[Any]]  # makes another one current
    properties: Callable[[torch.device], Any]
    capability: Callable[[torch.device], tuple[int, int] | None]  # NVIDIA's compute capability; None elsewhere
    multiplies_into_float32: bool  # torch.mm(out_dtype=) of 16-bit operands


def _cuda_capability(device: torch.device) -> tuple[int, int] | None:
    return None if torch.version.hip is not None else torch.cuda.get_device_capability(device)


CUDA = Accelerator(
    "cuda",
    "CUDA",
    # torch.cuda.current_device asks first whether CUDA is initialised. It is, where there is a tensor.
    getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device),
    torch.cuda.device,
    torch.cuda.get_device_properties,
    _cuda_capability,
    True,
)

ALL = {accelerator.type: accelerator for accelerator in (CUDA,)}


def of(device: torch.device) -> Accelerator | None:
    """None for other devices, and in Triton's interpreter, whose tensors are the CPU's."""
    return ALL.get(device.type)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; 2 in the interpreter, so that tests reach the kernels for few rows and for many."""
    accelerator = of(device)
    return 2 if accelerator is None else accelerator.properties(device).multi_processor_count
