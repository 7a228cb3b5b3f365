"""Inductor's lowerings of our operators: opaque calls, in place for the last reader; kernel launches in packages."""

from __future__ import annotations

import functools

from ..._private import unless_gone


@functools.cache
@unless_gone(
    "the lowerings of its operators in Inductor",
    "a compiled loss takes a second buffer of logits",
    lambda: None,
    (TypeError,),
)
def install() -> None:
    """Register everything, once. Takes over a second, because it imports Inductor."""
    from . import reuse

    reuse.install()
