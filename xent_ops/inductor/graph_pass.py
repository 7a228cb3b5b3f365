"""The pass as Inductor wants it: an object with a ``uuid()``, which runs the passes that were set before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import cache_tag, decomposition, report, rewrite


class ReplaceCrossEntropy(CustomGraphPass):
    """Runs ``previous``, a value of ``torch._inductor.config.pre_grad_custom_pass``, then replaces F.cross_entropy.

    One object rather than a list of passes: torch 2.11 takes no list.
    """

    def __init__(self, previous: Any = None) -> None:
        self.previous = previous
        self.timing_before = getattr(config, "pre_grad_pass_timing", None)  # what disable() puts back
        # Inductor picks its decompositions before it runs the pass; operators that only the pass brings come too late.
        decomposition.install()

    def __call__(self, graph: fx.Graph) -> None:
        for other in _passes(self.previous):
            other(graph)
        report.record(rewrite.replace_cross_entropy(graph))

    def uuid(self) -> Any:
        """What the key of torch's compile caches gets: our sources' hash, then the others' identifiers.

        None, which switches these caches off, where a chained pass has none: torch does so for that pass alone too.
        """
        others = []
        for other in _passes(self.previous):
            identifier = other.uuid() if isinstance(other, CustomGraphPass) else None
            if not identifier:
                return None
            others.append(identifier)
        return ("replace_cross_entropy", cache_tag.tag(), *others)


def _passes(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def settings(base: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` and what makes Inductor run ours, behind the pass in ``base`` or else the one that is set now."""
    current = base.get("pre_grad_custom_pass", config.pre_grad_custom_pass)
    merged = {**base, "pre_grad_custom_pass": with_ours(current)}
    if hasattr(config, "pre_grad_pass_timing"):
        # Since torch 2.13 passes with a uuid() run only on graphs that are in no cache, and the report would miss the
        # others. "early" is what torch did before: run the pass, then look up the graph that it made.
        merged.setdefault("pre_grad_pass_timing", "early")
    return merged


def ours_in(current: Any) -> ReplaceCrossEntropy | None:
    return next((one for one in _passes(current) if isinstance(one, ReplaceCrossEntropy)), None)


def with_ours(current: Any) -> Any:
    """The value for ``pre_grad_custom_pass`` that runs ``current`` and then ours, ``current`` if ours is in it."""
    return ReplaceCrossEntropy(current) if ours_in(current) is None else current


def without_ours(current: Any) -> Any:
    """What ``with_ours`` was given; a list of passes that somebody put ours into keeps the others."""
    if isinstance(current, ReplaceCrossEntropy):
        return current.previous
    if isinstance(current, (list, tuple)):
        kept: list[Any] = []
        for one in current:
            kept.extend(_passes(one.previous) if isinstance(one, ReplaceCrossEntropy) else (one,))
        return type(current)(kept)
    return current
