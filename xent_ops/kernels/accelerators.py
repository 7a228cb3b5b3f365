"""The types of GPU that our Triton kernels serve, one record for each. To add a type (XPU), add a record.

Imports torch only. torch calls AMD's GPUs "cuda".
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch


class Accelerator(NamedTuple):
    type: str  # torch.device.type
    key: str  # dispatch key
    current: Callable[[], int]  # the current device: launches run there
    on: Callable[[int], AbstractContextManager[Any]]  # sets another device as current
    properties: Callable[[torch.device], Any]
    capability: Callable[[torch.device], tuple[int, int] | None]  # NVIDIA's compute capability; None elsewhere
    multiplies_into_float32: bool  # torch.mm(out_dtype=) of 16-bit operands


CUDA = Accelerator(
    "cuda",
    "CUDA",
    # torch.cuda.current_device also checks that CUDA is initialised. If there is a tensor, it is.
    getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device),
    torch.cuda.device,
    torch.cuda.get_device_properties,
    lambda device: None if torch.version.hip is not None else torch.cuda.get_device_capability(device),
    True,
)

ALL = {accelerator.type: accelerator for accelerator in (CUDA,)}


def of(device: torch.device) -> Accelerator | None:
    """None for other devices, and in Triton's interpreter, which uses CPU tensors."""
    return ALL.get(device.type)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; 2 in the interpreter, so that tests reach the kernels for few rows and for many."""
    accelerator = of(device)
    return 2 if accelerator is None else accelerator.properties(device).multi_processor_count
