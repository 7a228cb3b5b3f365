"""Programmatic dependent launch (PDL): a kernel's programs start while the kernel before it ends, and wait on the GPU.

Otherwise 0.5 us pass between two kernels of a CUDA graph. Of both passes over few rows this is a tenth: 8 x 128256 take
14.2 us without it, 12.9 with it; with weights, smoothing, softcap and z-loss 20.6 and 18.3 (one H200, 2026-11-24). So
the kernels that serve few rows have it, and those that add up a vector. Kernels of many programs must not: each program
that lets the next kernel in takes 1.3 ns, and 131072 x 1024 took 249 us for 200.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .recording import RECORDING


@triton.jit
def wait_for_earlier_kernels(PDL: tl.constexpr):
    """A kernel with PDL calls this before it reads or writes: when it returns, all kernels before have ended.

    Only then is the next kernel let in. Let in before, which saves 1 % more, it could run beside the kernel before this
    one.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def supports_pdl(device: torch.device) -> bool:
    """What a launch passes as PDL. False in a package, whose launches are Inductor's."""
    return device.type == "cuda" and not RECORDING.get() and _supports_pdl(device)


@functools.cache
def _supports_pdl(device: torch.device) -> bool:
    # Below compute capability 9 there is none, above it nothing was measured. CUDA graphs need a driver of CUDA 12.3
    # for it; torch built for CUDA 12 accepts older ones, torch built for CUDA 13 does not.
    built_for = int((torch.version.cuda or "0").split(".")[0])
    return built_for >= 13 and torch.cuda.get_device_capability(device)[0] == 9
