"""Block sizes and numbers of programs, from the size of the unified buffer and the number of vector cores.

The unified buffer (UB) of a vector core holds every live tile. Tiles that are copied in or out count twice, because the
next tile arrives while one is used. The bytes that a kernel needs for each column of its block were counted in the IR
of triton-ascend 3.2.0: tiles share memory if they are not alive at the same time, and an operation does not write over
its operands. `make test-ascend` counts again. The code that bishengir generates for a device was never seen, so a
variable sets the block for measurements.
"""

from __future__ import annotations

import functools
import os

import torch
from triton import next_power_of_2
from triton.runtime import driver

UB_BYTES = 192 * 1024  # Atlas A2 and A3 (Ascend 910B, 910C)
UB_VARIABLE = "XENT_OPS_ASCEND_UB_BYTES"
BLOCK_VARIABLE = "XENT_OPS_ASCEND_BLOCK"
FRACTION = 0.9  # of the UB: scalars, reductions and alignment need memory too
MAX_PROGRAMS = 65535  # coreDim of a launch


def _reported_ub_bytes() -> int:
    """The size that CANN reports for this device; 0 if it reports none."""
    try:
        from tbe.common.platform import get_soc_spec, set_current_compile_soc_info

        set_current_compile_soc_info(torch.get_device_module("npu").get_device_name())
        return int(get_soc_spec("UB_SIZE"))
    except Exception:  # without CANN there is no tbe; with it, any error of an unknown chip
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
    """Size of the unified buffer: from the variable, else from the device, else an A2's."""
    text = os.environ.get(UB_VARIABLE)
    return _parse_ub_bytes(text) if text else _device_ub_bytes()


@functools.cache
def _parse_block(text: str) -> int:
    if not text.isdecimal() or int(text) == 0 or int(text) & (int(text) - 1):
        raise ValueError(f"{BLOCK_VARIABLE}={text!r} is not a power of two, like 4096")
    return int(text)


def block(classes: int, column_bytes: float) -> int:
    """The largest power of two of columns that fits the UB, or the variable's, but no more than the row needs."""
    text = os.environ.get(BLOCK_VARIABLE)
    fits = _parse_block(text) if text else 1 << (int(ub_bytes() * FRACTION / column_bytes).bit_length() - 1)
    return min(fits, next_power_of_2(max(1, classes)))


# Bytes for each column of a kernel's block, by its flags and element sizes: at least the bytes counted in its IR.

_CAPPED = (0, 68, 24)  # by SOFTCAP, in backward_kernel and the kernels of class probabilities


def forward_bytes(
    itemsize: int,
    *,
    SKIP_IGNORED: bool = False,
    HAS_WEIGHT: bool,
    HAS_SMOOTHING: bool,
    HAS_SCALE: bool,
    SOFTCAP: int,
    HAS_ARGMAX: bool = False,
    HAS_ENTROPY: bool = False,
) -> float:
    """For forward_kernel and shard_kernel."""
    if not (HAS_SMOOTHING or HAS_SCALE or SOFTCAP):
        both = HAS_ARGMAX and HAS_ENTROPY and itemsize == 4
        return 12.25 + 4 * itemsize + 4 * HAS_ENTROPY + 20 * HAS_ARGMAX + 4 * both
    number = 20.25 + 6 * itemsize + 4 * SKIP_IGNORED + (16 if SOFTCAP else 12) * HAS_ARGMAX
    number += 4 * (itemsize == 2 and (HAS_SCALE or SOFTCAP > 0))
    return number + HAS_SMOOTHING * (4 + 16 * HAS_WEIGHT) + (0, 56, 12)[SOFTCAP]


def backward_bytes(
    itemsize: int,
    *,
    HAS_GRAD_LSE: bool,
    HAS_ENTROPY: bool,
    HAS_WEIGHT: bool,
    HAS_SMOOTHING: bool,
    HAS_SCALE: bool,
    SOFTCAP: int,
) -> float:
    number = 16.25 + 2.25 * itemsize + 20 * HAS_ENTROPY + HAS_SMOOTHING * (4 + 12 * HAS_WEIGHT)
    return number + (_CAPPED[SOFTCAP] or 4 * HAS_SCALE)


def soft_bytes(
    itemsize: int,
    target_itemsize: int,
    *,
    HAS_GRAD_LSE: bool = False,
    HAS_WEIGHT: bool,
    HAS_SMOOTHING: bool,
    HAS_SCALE: bool,
    SOFTCAP: int,
) -> float:
    """For soft_forward_kernel and soft_backward_kernel."""
    number = 24.25 + 2.25 * itemsize + 2 * target_itemsize + 8 * HAS_WEIGHT + 8 * HAS_SMOOTHING
    return number + (_CAPPED[SOFTCAP] or 4 * HAS_SCALE)


@functools.cache
def vector_cores(device: torch.device) -> int:
    """The number of vector cores of this device."""
    return int(driver.active.utils.get_device_properties(device.index or 0)["num_vectorcore"])


def programs(rows: int, cores: int) -> tuple[int, int]:
    """(number of programs, rows of each except the last): one program per vector core, contiguous rows."""
    chunk = -(-rows // min(rows, cores, MAX_PROGRAMS))
    return -(-rows // chunk), chunk
