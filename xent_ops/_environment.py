"""Versions, driver and devices: a report needs them so that its figures can be understood on other machines."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re

import torch
from torch.utils import collect_env

from ._version import __version__


def distribution_version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def cpu_name() -> str:
    found = re.search(r"Model name:\s*(.+)", collect_env.get_cpu_info(collect_env.run) or "")
    return found[1].strip() if found else platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    return {
        "xent_ops": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        # From metadata: importing Triton is slow, and a broken Triton may be the problem to report.
        "triton": distribution_version(
            "triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-ascend"
        ),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),
    }
