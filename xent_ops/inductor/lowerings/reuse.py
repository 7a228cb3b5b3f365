"""One buffer of logits for a compiled step: lowers an operator to its in-place form if it is their last reader.

Inductor's own pass (reinplace_inplaceable_ops) refuses to write into an input of a graph, and the saved logits are an
input of the backward graph. AOTAutograd marks saved tensors as donated if no input or output shares their memory. The
gradient may be written over donated logits if the operator is their last reader (last_reader.py), and over the result
of a matrix product of the same graph if the operator is its only reader.

On a CPU without the C++ extension, and on devices without kernels, Inductor gets pointwise aten instead, which it fuses
into one kernel that writes over the logits. Other backends (aot_eager, NPU graphs) keep the opaque node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import decomposition
from torch._inductor.fx_passes import joint_graph
from torch._inductor.ir import DonatedBuffer
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V

from ..._private import unless_gone
from ...kernels import accelerators, cpu, reference, reference_soft
from ...kernels.options import as_record
from ...ops.library import OPERATORS
from ...ops.schemas import DECLARED
from . import calls, last_reader, packages, save

# Devices whose kernel can write over its input. NPUs are among them because the formula in aten compares integer
# vectors, which their vector cores do element by element (traced only, never run there).
DEVICES = {*accelerators.ALL, "npu", "cpu"}

# Functional operator -> (its in-place form, position of the argument that this overwrites).
INPLACE = {
    OPERATORS[in_place.removesuffix("_")].overload: (OPERATORS[in_place].overload, OPERATORS[in_place].position)
    for in_place in (f"{name}_" for name, (_, overwrites) in DECLARED.items() if overwrites is not None)
}
# It scales a gradient from the forward, in place on every device: plain torch scales in place too.
_SCALE = torch.ops.xent.linear_scale_grad.default
INPLACE[_SCALE] = (torch.ops.xent.scale_grad_.default, 0)

# These are pointwise in plain torch.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.xent.cross_entropy_backward.default: reference.cross_entropy_backward,
    torch.ops.xent.soft_cross_entropy_backward.default: reference_soft.soft_cross_entropy_backward,
}

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)  # their result is a new buffer


def writes_over(device: str) -> bool:
    """Is there a kernel of ours for this device? On a CPU without C++, Inductor fuses plain torch instead."""
    return device in DEVICES and (device != "cpu" or cpu.problem() is None)


@unless_gone("gradients written over logits", "a compiled loss takes a second buffer of logits", lambda *_: False)
def _dies_here(position: int, in_package: bool) -> bool:
    """Is the lowered node the last reader of its logits (the argument at ``position``), and the only one in this graph?

    The graph of a package has forward and backward. There other nodes may read before ``node``: Inductor orders these
    reads before the write. They may not read through a view, because the view's readers may come later.
    """
    node = V.graph.current_node
    source: Any = node.args[position]
    reader = node
    while True:
        if not isinstance(source, torch.fx.Node):
            return False
        other_users = [user for user in source.users if user is not reader and user.target not in last_reader.SIZES]
        if any(not in_package or user > node or _may_be_view(user) for user in other_users):
            return False
        if source.target not in _VIEWS:
            break
        source, reader = source.args[0], source
    if source.op == "placeholder":
        saved = V.graph.graph_inputs_original.get(str(source.target))
        return last_reader.MARK in node.name and isinstance(saved, DonatedBuffer)
    return source.target in _PRODUCTS


def _may_be_view(node: torch.fx.Node) -> bool:
    new = isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view
    return not new or node.target in last_reader.MAY_BE_VIEWS


def _unless_reused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    devices = {arg.device.type for arg in args if isinstance(arg, Tensor)}
    # Pointwise aten was slower on an H200, and did not reuse the logits: docs/lab/2026-11-inductor.md.
    return NotImplemented if any(map(writes_over, devices)) else function(*args, **as_record(kwargs))


def install() -> None:
    """Register everything. Clears a table that Inductor filled at an earlier compile, which lacks our entries."""
    forget = decomposition.fast_random_decomps.cache_clear
    positions = {op: position for op, (_, position) in INPLACE.items()}
    passes: list[Any] = [last_reader.MarkLastReaders(positions), save.SaveGradients()]
    joint_graph.pass_patterns += passes
    for op, (inplace, position) in INPLACE.items():
        _install(op, inplace, position)
    calls.install()
    # Last: without the lowerings above Inductor adds a fallback, and refuses an operator that has a decomposition too.
    for op, function in DECOMPOSITIONS.items():
        decomposition.decompositions[op] = functools.partial(_unless_reused, function)
    forget()


def _install(op: Any, inplace: Any, position: int) -> None:
    if op in lowerings:
        return
    opaque, in_place = calls.lowering(op), calls.lowering(inplace)

    @register_lowering(op, type_promotion_kind=None)
    def lower(*args: Any, **options: Any) -> Any:
        written = args[position]
        served = op is _SCALE or writes_over(written.get_device().type)
        if not (served and _dies_here(position, packages.packs(args))):
            return opaque(*args, **options)
        written.realize()
        outputs = in_place(*args, **options)
        return written if outputs is None else (*outputs, written)
