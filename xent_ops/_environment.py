"""What a report has to name so that its figures can be read elsewhere: versions, driver, devices."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

from ._version import __version__


def distribution_version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def triton_version() -> str | None:
    """By metadata: importing Triton costs time, and may be the very thing that is broken."""
    return distribution_version("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-ascend")


def driver_version() -> str | None:
    """Of the NVIDIA or AMD kernel driver; None where it cannot be found out."""
    if shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
            if lines:
                return lines[0]
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError):
            match = re.search(r"\d+\.\d+(\.\d+)*", Path(path).read_text())
            if match:
                return match.group()
    return None


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    return {
        "xent_ops": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": driver_version(),
    }
