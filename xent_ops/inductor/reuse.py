"""Inductor's lowering of operators that have a twin which writes over the logits: the twin, where the logits die.

Inductor's own pass (reinplace_inplaceable_ops) refuses to write into an input of a graph, and in a backward graph
the saved logits are one. AOTAutograd marks the saved tensors that neither inputs nor outputs share as donated; when the
operator is the last reader of donated logits (last_reader.py), or the only one of a product's, the gradient may take
their place.

The same lowering hands the backward what a mean divides by.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels import cpu
from ..ops.checks import DIVISORS, FLOATS
from . import calls, last_reader

# Devices whose kernel can write over its input. The formula in aten compares integer vectors, which the vector cores of
# an NPU do element by element (traced only, never run there).
DEVICES = {"cuda", "npu", "cpu"}

# Functional operator -> (its twin, which argument of both the logits are). The twin returns all outputs but the last,
# the gradient.
INPLACE = {
    torch.ops.xent.cross_entropy_backward.default: (torch.ops.xent.cross_entropy_backward_.default, 2),
    torch.ops.xent.cross_entropy_shard_backward.default: (torch.ops.xent.cross_entropy_shard_backward_.default, 2),
    torch.ops.xent.cross_entropy_with_grad.default: (torch.ops.xent.cross_entropy_with_grad_.default, 0),
}

# Those that divide grad_loss themselves, by their argument after the weight.
DIVIDING = {torch.ops.xent.cross_entropy_backward.default}

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)  # whose result is a buffer of its own


def writes_over(device: str) -> bool:
    """Is our kernel for this device the better one? On the CPU not plain torch's, which Inductor fuses instead."""
    return device in DEVICES and (device != "cpu" or cpu.problem() is None)


def _dies_here(node: torch.fx.Node, position: int) -> bool:
    """Is ``node`` the last and only reader of the memory of its logits, the argument at ``position``?"""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    source: Any = node.args[position]
    reader = node
    while True:
        if not isinstance(source, torch.fx.Node):
            return False
        if any(user is not reader and user.target not in last_reader.SIZES for user in source.users):
            return False
        if source.target not in _VIEWS:
            break
        source, reader = source.args[0], source
    if source.op == "placeholder":
        saved = V.graph.graph_inputs_original.get(str(source.target))
        return last_reader.is_marked(node) and isinstance(saved, ir.DonatedBuffer)
    return source.target in _PRODUCTS


def _undivided(node: torch.fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with a ``divisor``, where ``grad_loss`` is an input of the graph divided by another, both (), expanded.

    As that of a mean is: the kernel then divides, and not a launch that takes 2 us for one number. Of values that are
    no inputs Inductor may have forgotten what they were lowered to; inputs that were written to may have been divided
    before.
    """
    from torch._inductor.lowering import lowerings

    expanded: Any = node.args[0]
    if len(args) > 6 or not _calls(expanded, aten.expand.default):
        return args
    quotient: Any = expanded.args[0]
    if not _calls(quotient, aten.div.Tensor):
        return args
    grad, divisor = map(_input_number, quotient.args)
    if grad is None or divisor is None or divisor.get_device() != grad.get_device():
        return args
    dtypes = (grad.get_dtype(), divisor.get_dtype())
    if dtypes[0] not in FLOATS or dtypes[1] not in DIVISORS:
        return args
    if torch.float64 in dtypes and args[2].get_dtype() != torch.float64:  # the kernel divides float32 numbers
        return args
    rows = lowerings[aten.expand.default](grad, args[0].get_size())
    return rows, *args[1:], *[None] * (6 - len(args)), divisor


def _calls(node: Any, op: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is op


def _input_number(value: Any) -> Any:
    """The input of the graph that ``value`` is, if it is a tensor of shape () that nothing has written to."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if not (isinstance(value, torch.fx.Node) and value.op == "placeholder"):
        return None
    box = V.graph.graph_inputs.get(str(value.target))
    if not isinstance(box, ir.TensorBox) or box.get_size() or box.get_name() in V.graph.mutated_buffers:
        return None
    return box


def install() -> None:
    last_reader.install({op: position for op, (_, position) in INPLACE.items()})
    for op, (inplace, position) in INPLACE.items():
        _install(op, inplace, position)


def _install(op: Any, inplace: Any, position: int) -> None:
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    if op in lowerings:
        return
    opaque, in_place = calls.lowering(op), calls.lowering(inplace)

    @register_lowering(op, type_promotion_kind=None)
    def lower(*args: Any, **options: Any) -> Any:
        if op in DIVIDING:
            args = _undivided(V.graph.current_node, args)
        logits = args[position]
        if not (writes_over(logits.get_device().type) and _dies_here(V.graph.current_node, position)):
            return opaque(*args, **options)
        logits.realize()
        outputs = in_place(*args, **options)
        return logits if outputs is None else (*outputs, logits)
