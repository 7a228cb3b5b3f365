"""Inductor sees the backward operators as pointwise aten, so that it can write the gradient over dead logits.

An opaque backward allocates a second buffer of the logits' size. Lowered, Inductor emits one kernel that reuses
the logits: one buffer instead of two. Other backends (aot_eager, NPU graphs) keep the opaque node.
"""

from __future__ import annotations

from ..ops.library import LOWERINGS


def install() -> None:
    """Idempotent. Clears the table that Inductor caches at the first compile of a process, where it lacks ours."""
    from torch._inductor import decomposition

    decomposition.decompositions.update(LOWERINGS)
    decomposition.fast_random_decomps.cache_clear()
