"""The pass in the form that Inductor expects: an object with a ``uuid()``. It runs earlier passes first."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._inductor import config, list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..._private import unless_gone
from .. import cache_tag, lowerings
from . import report, rewrite
from .head import Heads

_RUNS = "use_pre_grad_passes"  # False in mode="lite"


class ReplaceCrossEntropy(CustomGraphPass):
    """Runs ``previous``, a value of ``torch._inductor.config.pre_grad_custom_pass``, then replaces F.cross_entropy.

    It is one object and no list of passes, because torch 2.11 takes no list.
    """

    def __init__(self, previous: Any = None, heads: Heads = Heads()) -> None:  # noqa: B008 (it is frozen)
        self.previous, self.heads = previous, heads
        self.timing_before = getattr(config, "pre_grad_pass_timing", None)  # disable() restores it
        # Inductor picks its decompositions before the pass runs, and the pass may add the first of our operators.
        lowerings.install()

    def __call__(self, graph: fx.Graph) -> None:
        for other in _passes(self.previous):
            other(graph)
        self._replace(graph)

    @unless_gone("a run of the pass over a graph", "losses there may stay as they are written", lambda *_: None)
    def _replace(self, graph: fx.Graph) -> None:
        report.record(rewrite.replace_cross_entropy(graph, self.heads))

    def uuid(self) -> Any:
        """Our part of the keys of torch's compile caches: our sources' hash, our option, the other passes' identifiers.

        None if a chained pass has no identifier. That turns the caches off, as torch does for that pass alone.
        """
        others = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in _passes(self.previous)]
        return ("replace_cross_entropy", cache_tag.tag(), str(self.heads), *others) if all(others) else None


def _passes(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def mode_options(name: str) -> dict[str, Any]:
    """torch.compile's settings for this mode. It takes either a mode or options, and the pass needs options."""
    every = list_mode_options()
    modes = {mode: found for mode, found in every.items() if found.get(_RUNS, True)}
    if name not in modes:
        why = "runs no passes, and F.cross_entropy would stay" if name in every else "is none that torch has"
        raise ValueError(f"the mode {name!r} {why}; valid are {', '.join(map(repr, modes))}")
    return modes[name]


def settings(base: Mapping[str, Any], heads: Heads) -> dict[str, Any]:
    """``base``, with settings that run our pass after the pass in ``base`` or the one that is set now."""
    if not isinstance(base, Mapping):
        raise TypeError(f"base must be a dict of Inductor's options, or the name of a mode, got {type(base).__name__}")
    if not base.get(_RUNS, True):
        raise ValueError(f"{_RUNS}=False keeps Inductor from running the pass, and F.cross_entropy would stay")
    current = base.get("pre_grad_custom_pass", config.pre_grad_custom_pass)
    merged = {**base, "pre_grad_custom_pass": with_ours(current, heads)}
    if hasattr(config, "pre_grad_pass_timing"):
        # torch 2.13 runs passes with a uuid() only on graphs that are in no cache, so the report would miss cached
        # graphs. "early" runs the pass first and looks up the resulting graph, as older versions do.
        merged.setdefault("pre_grad_pass_timing", "early")
    return merged


def ours_in(current: Any) -> ReplaceCrossEntropy | None:
    return next((one for one in _passes(current) if isinstance(one, ReplaceCrossEntropy)), None)


def with_ours(current: Any, heads: Heads) -> Any:
    """The value for ``pre_grad_custom_pass`` that runs ``current``, then ours: ``current`` if it contains ours."""
    ours = ours_in(current)
    if ours is None:
        return ReplaceCrossEntropy(current, heads)
    if ours.heads == heads:
        return current
    other = ReplaceCrossEntropy(ours.previous, heads)
    other.timing_before = ours.timing_before
    return other if current is ours else type(current)(other if one is ours else one for one in current)


def without_ours(current: Any) -> Any:
    """The inverse of ``with_ours``: the value without our pass. In a list of passes it removes only ours."""
    if isinstance(current, ReplaceCrossEntropy):
        return current.previous
    if isinstance(current, (list, tuple)):
        remaining = [_passes(one.previous) if isinstance(one, ReplaceCrossEntropy) else (one,) for one in current]
        return type(current)(itertools.chain.from_iterable(remaining))
    return current
