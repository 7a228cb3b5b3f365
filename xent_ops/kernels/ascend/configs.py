"""Which block for which row, and how many programs: from the size of the unified buffer and the number of vector cores.

The unified buffer (UB) of a vector core holds every tile that is alive at one moment, and twice what is copied in or
out, since the next tile arrives while one is worked on. How many bytes a kernel needs for each column of its block was
counted in the IR to which triton-ascend 3.2.0 lowers it, as if a compiler let no two tiles share memory, and
`make test-ascend` counts again. What bishengir makes of it on a device was never seen.
"""

from __future__ import annotations

import functools
import os

import torch
from triton import next_power_of_2
from triton.runtime import driver

UB_BYTES = 192 * 1024  # Atlas A2 and A3 (Ascend 910B, 910C)
UB_VARIABLE = "XENT_OPS_ASCEND_UB_BYTES"
FRACTION = 0.9  # of the UB: scalars, reductions and alignment take the rest
MAX_PROGRAMS = 65535  # coreDim of a launch


def _reported_ub_bytes() -> int:
    """What CANN says about this device; 0 where it says nothing."""
    try:
        from tbe.common.platform import get_soc_spec, set_current_compile_soc_info

        set_current_compile_soc_info(torch.get_device_module("npu").get_device_name())
        return int(get_soc_spec("UB_SIZE"))
    except Exception:  # without CANN no tbe; with it, whatever an unknown chip makes it raise
        return 0


@functools.cache
def _parse_ub_bytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 4096:
        raise ValueError(f"{UB_VARIABLE}={text!r} is not a number of bytes of at least 4096, like {UB_BYTES}")
    return int(text)


@functools.cache
def _device_ub_bytes() -> int:
    return _reported_ub_bytes() or UB_BYTES


def ub_bytes() -> int:
    """Size of the unified buffer: the variable's, else the device's, else that of an A2."""
    text = os.environ.get(UB_VARIABLE)
    return _parse_ub_bytes(text) if text else _device_ub_bytes()


def block(classes: int, column_bytes: int) -> int:
    """The largest power of two of columns that fits the UB, but no more than the row needs."""
    fits = int(ub_bytes() * FRACTION) // column_bytes
    return min(1 << (fits.bit_length() - 1), next_power_of_2(classes))


def forward_bytes(
    itemsize: int, HAS_WEIGHT: bool, HAS_SMOOTHING: bool, SOFTCAP: int, HAS_ARGMAX: bool, HAS_ENTROPY: bool
) -> int:
    """Bytes a column of forward_kernel: 4096 columns for a plain loss, 1024 with everything."""
    number = 25 + 4 * itemsize + 4 * HAS_ENTROPY + (0, 56, 12)[SOFTCAP]
    number += HAS_ARGMAX * (4 + 2 * itemsize + 8 * (SOFTCAP > 0))
    return number + HAS_SMOOTHING * (8 + 16 * HAS_WEIGHT)


def light_backward_bytes(itemsize: int) -> int:
    """Bytes a column of light_backward_kernel: 4096 columns of 2 bytes, 2048 of 4."""
    return 33 + 5 * itemsize


def backward_bytes(
    itemsize: int, HAS_GRAD_LSE: bool, HAS_ENTROPY: bool, HAS_WEIGHT: bool, HAS_SMOOTHING: bool, SOFTCAP: int
) -> int:
    """Bytes a column of backward_kernel."""
    number = 29 + 7 * itemsize + 4 * HAS_GRAD_LSE + 16 * HAS_ENTROPY + (0, 64, 24)[SOFTCAP]
    return number + HAS_SMOOTHING * (8 + 16 * HAS_WEIGHT)


@functools.cache
def vector_cores(device: torch.device) -> int:
    """Of the tensors' device."""
    return int(driver.active.utils.get_device_properties(device.index or 0)["num_vectorcore"])


def programs(rows: int, cores: int) -> tuple[int, int]:
    """(number of programs, rows of each but the last): one program a vector core, contiguous rows."""
    chunk = -(-rows // min(rows, cores, MAX_PROGRAMS))
    return -(-rows // chunk), chunk
