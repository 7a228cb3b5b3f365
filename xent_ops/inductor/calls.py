"""How Inductor's code calls our operators: one opaque call each, with options as the schema declares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops.schemas import COMPOSITES, SCHEMAS


def install() -> None:
    """A lowering for every operator that has none."""
    from torch._inductor.lowering import lowerings, register_lowering

    for name in SCHEMAS.keys() - set(COMPOSITES):
        op = getattr(torch.ops.xent, name).default
        if op not in lowerings:
            register_lowering(op, type_promotion_kind=None)(lowering(op))


def lowering(op: Any) -> Callable[..., Any]:
    """Of ``op`` as it is."""
    from torch._inductor.lowering import fallback_handler

    opaque = fallback_handler(op, add_to_fallback_set=False)

    def lower(*args: Any, **options: Any) -> Any:
        return opaque(*args, **_as_declared(op, options))

    return lower


def _as_declared(op: Any, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` in the types of the schema, as the dispatcher would convert them; for a package every one of them.

    An option at its default is not in the graph. AOTInductor of torch 2.13 then leaves it out of what it packs about
    the call, yet passes its integers, and the program ends with "Mismatch between ints consumed and num_ints".
    """
    from torch._inductor.virtualized import V

    declared = {arg.name: arg for arg in op._schema.arguments if arg.kwarg_only}
    if V.graph.aot_mode:
        options = {name: arg.default_value for name, arg in declared.items()} | options
    numbers = {name: float(value) for name, value in options.items() if _is_float(declared[name], value)}
    return options | numbers


def _is_float(declared: Any, value: Any) -> bool:
    return isinstance(value, int) and "float" in str(declared.type)
