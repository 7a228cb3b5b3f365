"""Versions, driver and devices: a report needs them so that its figures can be understood on other machines."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

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


@functools.cache
def package_problem() -> str | None:
    """Why this process cannot load the AOTInductor packages that it compiles, or None.

    Inductor compiles them by CXX, else g++. A compiler may link libstdc++ statically. Then the process has two copies
    of it, and torch crashes as it loads any package, one without our operators too (torch 2.11, 2026-11-29).
    """
    if sys.platform != "linux":
        return None
    compiler = os.environ.get("CXX") or "g++"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        command = [*shlex.split(compiler), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        try:
            subprocess.run(command, input=_PROBE, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            return f"the C++ compiler {compiler} (CXX, else g++) does not compile: {words[0] if words else error}"
        if b"libstdc++.so" in library.read_bytes():  # among the libraries that the dynamic linker loads
            return None
    return (
        f"the C++ compiler {compiler} (CXX, else g++) does not link the shared libstdc++ that torch uses, so torch "
        "would crash as it loads a package; set CXX to another compiler, such as /usr/bin/g++"
    )


# Its code is in libstdc++, not in headers.
_PROBE = "#include <iostream>\nvoid probe() { std::cout << 1; }\n"
