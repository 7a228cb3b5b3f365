"""The baseline for Inductor's lowerings of our backward: an opaque call, whose gradient has a buffer of its own."""

import contextlib
from collections.abc import Iterator

import torch
from torch._functorch import config
from torch._inductor import decomposition

from xent_ops.inductor.lowerings import install
from xent_ops.inductor.lowerings.reuse import DECOMPOSITIONS


@contextlib.contextmanager
def opaque_backward() -> Iterator[None]:
    """Compile without decompositions. Compile caches are off inside, because their keys do not hold decompositions."""
    install()
    ours = {op: decomposition.decompositions.pop(op) for op in DECOMPOSITIONS}
    decomposition.fast_random_decomps.cache_clear()
    try:
        with (
            # The backward is compiled with the forward. Compiled later, outside of this context, it could come from the
            # caches, as one that writes over the logits.
            config.patch(donated_buffer=False, force_non_lazy_backward_lowering=True),
            torch.compiler.config.patch(force_disable_caches=True),  # type: ignore[attr-defined]
        ):
            yield
    finally:
        decomposition.decompositions.update(ours)
        decomposition.fast_random_decomps.cache_clear()
