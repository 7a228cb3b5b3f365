"""Launches that are recorded into a graph instead of run.

AOTInductor packs the kernels that its graph shows. So inductor/lowerings/packages.py sets ``RECORDING``, calls a
launcher with fake tensors and traces it: its allocations and launches become nodes. Sizes may then be symbolic
(sizes.py).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

RECORDING: ContextVar[bool] = ContextVar("RECORDING", default=False)


def record(kernel: Any, grid: int, *arguments: Any, **constants: Any) -> None:
    """``kernel[(grid,)](...)`` as a node."""
    torch.library.wrap_triton(kernel)[(grid,)](*arguments, **constants)
