"""The doctor's report on Ascend NPUs: the required parts that are installed, and the parts that do not fit together.

Versions come from metadata. Without CANN an import of torch_npu would fail, and missing CANN is one of the problems.
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
    torch: str | None  # the torch version that it requires, such as 2.13
    triton_ascend: str | None
    has_backend: bool  # the Triton that Python imports has an ascend backend
    has_cann_language: bool  # it also has triton.language.extra.cann, which Inductor-Ascend's kernels import
    cann: str | None  # its folder


def _torch_of(torch_npu: str | None) -> str | None:
    """torch_npu requires one minor version of torch, such as ``torch==2.13.0.*``."""
    requirements = importlib.metadata.requires("torch_npu") or [] if torch_npu else []
    found = re.search(r"^torch\s*\(?==\s*(\d+\.\d+)", "\n".join(requirements), re.MULTILINE)
    return found[1] if found else None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # the package is missing or its import fails
        return False


def parts() -> Parts:
    torch_npu = _environment.distribution_version("torch_npu")
    return Parts(
        torch_npu,
        _torch_of(torch_npu),
        _environment.distribution_version("triton-ascend"),
        torch_npu is not None and _exists("triton.backends.ascend"),  # this imports Triton, which takes a second
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
    """Problems that keep an NPU from running, if torch_npu is installed."""
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
