"""Decompositions of the backward operators for Inductor, so that a compiled step needs one buffer of logits, not two.

On CUDA, on NPUs, and on a CPU with the C++ extension, there is no decomposition: our kernel writes the gradient over
the logits (reuse.py). Elsewhere Inductor gets pointwise aten, which it fuses into one kernel that writes over the
logits. Other backends (aot_eager, NPU graphs) keep the opaque node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import decomposition

from ...kernels import reference, reference_soft
from ...kernels.options import as_record
from . import calls, reuse

_ops = torch.ops.xent

# These are pointwise in plain torch.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _ops.cross_entropy_backward.default: reference.cross_entropy_backward,
    _ops.soft_cross_entropy_backward.default: reference_soft.soft_cross_entropy_backward,
}


def _unless_reused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    devices = {arg.device.type for arg in args if isinstance(arg, Tensor)}
    # Pointwise aten was slower on an H200, and did not reuse the logits: docs/lab/2026-11-inductor.md.
    return NotImplemented if any(map(reuse.writes_over, devices)) else function(*args, **as_record(kwargs))


def install() -> None:
    """Register everything. Clears a table that Inductor filled at an earlier compile, which lacks our entries."""
    forget = decomposition.fast_random_decomps.cache_clear
    reuse.install()
    calls.install()
    # Last: without the lowerings above Inductor adds a fallback, and refuses an operator that has a decomposition too.
    for op, function in DECOMPOSITIONS.items():
        decomposition.decompositions[op] = functools.partial(_unless_reused, function)
    forget()
