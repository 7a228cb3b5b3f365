"""How Inductor's code calls our operators: one opaque call each, of the kernel itself where the code is Python.

Generated code would call ``torch.ops.xent.<operator>.default``: on its way through the dispatcher's two Python kernels
(autograd's, which has nothing to do below AOTAutograd, and the device's) a forward takes the host 13 us for the 6 of
the device's alone (one core of an EPYC, launches that do nothing, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops.library import KERNELS
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
        outputs = opaque(*args, **_packed(op, options))
        _call_the_kernel(op)
        return outputs

    return lower


def _packed(op: Any, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` as the graph has them; for a package every one of the schema's.

    Their types are the schema's already: AOTAutograd recorded them behind the dispatcher, which converts them.

    An option at its default is not in the graph. AOTInductor of torch 2.13 then leaves it out of what it packs about
    the call, yet passes its integers, and the program ends with "Mismatch between ints consumed and num_ints".
    """
    from torch._inductor.virtualized import V

    if not V.graph.aot_mode:
        return options
    return {arg.name: arg.default_value for arg in op._schema.arguments if arg.kwarg_only} | options


def _call_the_kernel(op: Any) -> None:
    """Have the call that was lowered last name the device's kernel, where there is Python to call it."""
    from torch._inductor.virtualized import V

    graph = V.graph
    if graph.cpp_wrapper or graph.aot_mode or getattr(graph, "fx_wrapper", False):
        return
    call: Any = next(made for made in reversed(graph.operations) if getattr(made, "op_overload", None) is op)
    device, name = call.get_device().type, op._schema.name.removeprefix("xent::")
    if name in KERNELS.get(device, {}):
        call.set_python_kernel_name(f"torch.ops.xent.kernels[{device!r}][{name!r}]")
