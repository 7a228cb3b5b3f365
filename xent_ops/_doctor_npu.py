"""What doctor says about Ascend NPUs: which of the parts that they need are there, and which do not fit together.

Versions are read from metadata. An import of torch_npu fails where CANN is missing, which is one of the findings.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass

import torch

from . import _environment
from .kernels import devices


@dataclass(frozen=True)
class Parts:
    torch_npu: str | None  # its version
    torch: str | None  # the torch that it asks for, like 2.13
    triton_ascend: str | None
    has_backend: bool  # the triton that is imported has an ascend backend
    has_cann_language: bool  # and triton.language.extra.cann, which the kernels of Inductor-Ascend import
    cann: str | None  # its folder


def _torch_of(torch_npu: str | None) -> str | None:
    """torch_npu requires one minor version of torch: ``torch==2.13.0.*``."""
    requirements = importlib.metadata.requires("torch_npu") or [] if torch_npu else []
    found = re.search(r"^torch\s*\(?==\s*(\d+\.\d+)", "\n".join(requirements), re.MULTILINE)
    return found[1] if found else None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # its package is missing, or fails when it is imported
        return False


def parts() -> Parts:
    torch_npu = _environment.distribution_version("torch_npu")
    return Parts(
        torch_npu,
        _torch_of(torch_npu),
        _environment.distribution_version("triton-ascend"),
        torch_npu is not None and _exists("triton.backends.ascend"),  # imports Triton, which takes a second
        torch_npu is not None and _exists("triton.language.extra.cann"),
        os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME"),
    )


def why(found: Parts) -> str:
    """One line for the table of kernels."""
    if found.torch_npu is None:
        return "torch_npu is not installed; never run on a device so far (docs/npu.md)"
    compiled = "compiles" if found.has_cann_language else "cannot compile (no triton.language.extra.cann)"
    return (
        f"torch_npu {found.torch_npu}, triton-ascend {found.triton_ascend or 'not found'}, CANN "
        f"{found.cann or 'not set'}; Inductor-Ascend {compiled} the kernels that it generates; never run on a device "
        "so far (docs/npu.md)"
    )


def problems(found: Parts) -> list[str]:
    """What keeps an NPU from running, where torch_npu is installed."""
    if found.torch_npu is None:
        return []
    wrong = []
    own = ".".join(torch.__version__.split(".")[:2])
    if found.torch is not None and found.torch != own:
        wrong.append(f"torch_npu {found.torch_npu} belongs to torch {found.torch}, and this is {torch.__version__}")
    if not found.has_backend:
        wrong.append(f"the triton that is imported has no ascend backend: {devices.INSTALL_ASCEND}")
    if found.cann is None:
        wrong.append(f"CANN is not found: {devices.SOURCE_CANN}")
    return wrong
