"""Calls of our operators as AOTInductor packages need them: with every option spelled out.

An option at its default is not in the graph. AOTInductor of torch 2.13 then leaves it out of what it packs about the
call, yet passes its integers, and the program ends with "Mismatch between ints consumed and num_ints".
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops.schemas import COMPOSITES, SCHEMAS


def spelled_out(op: Any, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` and the defaults of all others while a package is made; ``options`` otherwise."""
    from torch._inductor.virtualized import V

    if not V.graph.aot_mode:
        return options
    return {arg.name: arg.default_value for arg in op._schema.arguments if arg.kwarg_only} | options


def install() -> None:
    """A lowering for every operator that has none: still one opaque call."""
    from torch._inductor.lowering import lowerings

    for name in SCHEMAS.keys() - set(COMPOSITES):
        op = getattr(torch.ops.xent, name).default
        if op not in lowerings:
            _install(op)


def _install(op: Any) -> None:
    from torch._inductor.lowering import fallback_handler, register_lowering

    opaque = fallback_handler(op, add_to_fallback_set=False)

    @register_lowering(op, type_promotion_kind=None)
    def lower(*args: Any, **options: Any) -> Any:
        return opaque(*args, **spelled_out(op, options))
