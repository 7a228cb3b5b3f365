"""The kernels of each kind of device, imported when the first tensor arrives there: Triton costs a second."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

Launchers = dict[str, Callable[..., Any]]  # by the name of the operator


@functools.cache
def triton_launchers() -> Launchers:
    """For CUDA and ROCm."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "xent_ops runs on CUDA and ROCm tensors through Triton, which could not be imported: install the "
            "triton that belongs to this build of torch"
        ) from error
    _warn_of_interpreter()
    from .triton.launch import LAUNCHERS

    return LAUNCHERS


@functools.cache
def ascend_launchers() -> Launchers:
    try:
        from triton.backends import backends
    except ImportError as error:
        raise ImportError(
            f"xent_ops runs on Ascend NPUs through triton-ascend, and no triton could be imported: {INSTALL_ASCEND}"
        ) from error
    if "ascend" not in backends and not interpreter_is_set():
        raise ImportError(
            "xent_ops runs on Ascend NPUs through triton-ascend, and the triton that is installed has no ascend "
            f"backend (it has: {', '.join(sorted(backends)) or 'none'}): {INSTALL_ASCEND}"
        )
    _warn_of_interpreter()
    if not interpreter_is_set():
        _find_ascend_driver()
    from .ascend.launch import LAUNCHERS

    return LAUNCHERS


def _find_ascend_driver() -> None:
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except RuntimeError as error:
        if not str(error).startswith("0 active drivers"):
            raise
        raise RuntimeError(
            f"triton-ascend does not find CANN's compiler (bisheng) on this process's PATH: {SOURCE_CANN}. "
            f"Triton said: {error}"
        ) from error


INSTALL_ASCEND = (
    "run `pip uninstall triton` and `pip install triton-ascend`, which owns the same import name, beside the torch_npu "
    "that belongs to this torch (docs/npu.md)"
)
SOURCE_CANN = (
    "run `source /usr/local/Ascend/ascend-toolkit/set_env.sh` (from CANN 8.5 on /usr/local/Ascend/cann/set_env.sh) in "
    "the shell that starts Python (docs/npu.md)"
)


def interpreter_is_set() -> bool:
    """Will Triton run its kernels in an interpreter? It reads the variable when it is imported, by this rule."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _warn_of_interpreter() -> None:
    if interpreter_is_set():
        warnings.warn(
            "TRITON_INTERPRET is set: every Triton kernel of this process, those of xent_ops among them, runs in "
            "an interpreter, a thousand times slower than compiled. Unset it unless you are debugging a kernel.",
            stacklevel=3,
        )
