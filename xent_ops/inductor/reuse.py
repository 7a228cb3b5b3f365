"""Inductor's lowering of ``cross_entropy_backward``: the in-place kernel where the logits die with it.

Inductor's own pass (reinplace_inplaceable_ops) refuses to write into an input of a graph, and in a backward graph
the saved logits are one. AOTAutograd marks the saved tensors that nobody else can see as donated; when the backward is
the only reader of donated logits, the gradient may take their place.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels import cpu
from .packages import spelled_out

# Devices whose kernel can write over its input. The formula in aten compares integer vectors, which the vector cores of
# an NPU do element by element (traced only, never run there).
DEVICES = {"cuda", "npu", "cpu"}

# Functional operator -> its twin that writes over the logits, argument 2 of both.
INPLACE = {torch.ops.xent.cross_entropy_backward.default: torch.ops.xent.cross_entropy_backward_.default}

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)  # whose result is a buffer of its own


def writes_over(device: str) -> bool:
    """Is our kernel for this device the better one? On the CPU not plain torch's, which Inductor fuses instead."""
    return device in DEVICES and (device != "cpu" or cpu.problem() is None)


def _dies_here(node: torch.fx.Node) -> bool:
    """Is ``node`` the last and only reader of the memory of its logits?"""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    source: Any = node.args[2]
    reader = node
    while True:
        if not isinstance(source, torch.fx.Node) or list(source.users) != [reader]:
            return False
        if source.target not in _VIEWS:
            break
        source, reader = source.args[0], source
    if source.op == "placeholder":
        return isinstance(V.graph.graph_inputs_original.get(str(source.target)), ir.DonatedBuffer)
    return source.target in _PRODUCTS


def install() -> None:
    for op, inplace in INPLACE.items():
        _install(op, inplace)


def _install(op: Any, inplace: Any) -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
    from torch._inductor.virtualized import V

    if op in lowerings:
        return
    opaque = fallback_handler(op, add_to_fallback_set=False)

    @register_lowering(op, type_promotion_kind=None)
    def lower(grad_loss: Any, grad_lse: Any, logits: Any, *rest: Any, **options: Any) -> Any:
        options = spelled_out(op, options)
        if not (writes_over(logits.get_device().type) and _dies_here(V.graph.current_node)):
            return opaque(grad_loss, grad_lse, logits, *rest, **options)
        logits.realize()
        ir.FallbackKernel.create(inplace, grad_loss, grad_lse, logits, *rest, **options)
        return logits
