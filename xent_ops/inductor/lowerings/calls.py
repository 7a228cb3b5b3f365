"""Lowerings that let Inductor's code call our operators: one opaque call each, with the options of the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V

from ..._private import unless_gone
from ...kernels import accelerators
from ...ops.schemas import COMPOSITES, SCHEMAS
from . import packages


def install() -> None:
    """Register a lowering for every operator that has none, and for the products of packages."""
    lowerings.update(packages.PRODUCTS)  # register_lowering refuses out=
    for name in SCHEMAS.keys() - set(COMPOSITES):
        op = getattr(torch.ops.xent, name).default
        if op not in lowerings:
            register_lowering(op, type_promotion_kind=None)(lowering(op))


def lowering(op: Any) -> Callable[..., Any]:
    """A lowering that calls ``op``."""
    opaque = fallback_handler(op, add_to_fallback_set=False)

    def lower(*args: Any, **options: Any) -> Any:
        if packages.packs(args):
            return packages.lower(op._schema.name.removeprefix("xent::"), args, options)
        outputs = opaque(*args, **_packed(op, options))
        _name_the_kernel(op)
        return outputs

    return lower


@unless_gone("direct calls of kernels in Inductor's code", "it goes through the dispatcher", lambda op: None)
def _name_the_kernel(op: Any) -> None:
    """Make Inductor's Python code call our Triton kernel directly. The dispatcher has nothing to do there.

    A compiled step of 64 x 4096 outside a CUDA graph takes the host 1.2 times as long as one of F.cross_entropy, and
    1.7 to 1.9 times without this (H200, torch 2.11, 2026-11-22).
    """
    call: Any = next(
        operation for operation in reversed(V.graph.operations) if getattr(operation, "op_overload", None) is op
    )
    if accelerators.of(call.get_device()) is not None and not (V.graph.cpp_wrapper or V.graph.aot_mode):
        name = op._schema.name.removeprefix("xent::")
        call.set_python_kernel_name(f"__import__('xent_ops').ops.library.OPERATORS[{name!r}].on_triton")


@unless_gone("defaults in packages", "AOTInductor may refuse integers", lambda op, options: options)
def _packed(op: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The graph's ``options``. For an AOTInductor package it adds the defaults.

    An option at its default is not in the graph. AOTInductor of torch 2.13 then omits it from the description of the
    call, but passes its integers, and the program ends with "Mismatch between ints consumed and num_ints".
    """
    if not V.graph.aot_mode:
        return options
    return {arg.name: arg.default_value for arg in op._schema.arguments if arg.kwarg_only} | options
