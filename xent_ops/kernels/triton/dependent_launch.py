"""Programmatic dependent launch (PDL): a kernel's programs start while the kernel before it ends, and wait on the GPU.

Without it about 0.5 us pass between two kernels of a CUDA graph. Few rows take a tenth less with it: 8 x 128256 12.9 us
for 14.2, with weights, smoothing, softcap and z-loss 18.3 for 20.6 (both passes, one H200, 2026-11-24). So the kernels
that few rows launch have it. Kernels of many programs must not have it: each program that lets the next kernel start
takes 1.3 ns. With it in every kernel 131072 x 1024 took 249 us, without it 200.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .recording import RECORDING


@triton.jit
def wait_for_earlier_kernels(PDL: tl.constexpr):
    """A kernel with PDL calls this before it reads or writes.

    It waits until all earlier kernels have ended, then lets the next kernel start. In the other order the next kernel
    could run while the kernel before this one still writes.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def supports_pdl(device: torch.device) -> bool:
    """The constexpr PDL of a launch on this device. False in a package, where Inductor launches."""
    return device.type == "cuda" and not RECORDING.get() and _supports_pdl(device)


@functools.cache
def _supports_pdl(device: torch.device) -> bool:
    # GPUs below compute capability 9 lack it; nothing was measured on newer ones. In a CUDA graph it needs a driver of
    # CUDA 12.3. A torch built for CUDA 12 also runs with older drivers, one built for CUDA 13 does not.
    built_for = int((torch.version.cuda or "0").split(".")[0])
    return built_for >= 13 and torch.cuda.get_device_capability(device)[0] == 9
