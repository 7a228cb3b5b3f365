"""Inductor's lowerings of our operators: opaque calls, in place for the last reader; kernel launches in packages."""

from __future__ import annotations

from ..._private import LEFT_OUT, unless_gone

_WHAT = "the lowerings of its operators in Inductor"


def install() -> None:
    """Register everything, once. Takes over a second, because it imports Inductor."""
    if _WHAT not in LEFT_OUT:
        _install()


@unless_gone(_WHAT, "a compiled loss takes a second buffer of logits", lambda: None, (TypeError,))
def _install() -> None:
    from . import decomposition

    decomposition.install()
