"""Lowers an operator on CUDA to the launches of its Triton kernels, in AOTInductor packages alone.

A package runs without Python, which compiles and launches our kernels. So there the launcher is traced (recording.py),
and what it allocates and launches is lowered in the operator's place: the package holds cubins, and no operator of
ours. Everywhere else the operator stays one opaque call.

Not by a decomposition with torch.library.wrap_triton: Inductor removed its launches, which have no users, and the
package gave NaN (torch 2.11).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ..ops.library import OPERATORS


def packs(args: tuple[Any, ...]) -> bool:
    """Is a package made, of a call with these arguments, whose kernels Python would launch?"""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    first = next(arg for arg in args if isinstance(arg, ir.IRNode))
    device = first.get_device()
    return V.graph.aot_mode and device is not None and device.type == "cuda"


def lower(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Lower a call of ``xent::name``."""
    from torch._inductor import ir
    from torch._inductor.lowering import process_subgraph_nodes
    from torch._inductor.virtualized import V

    boxes = {index: _in_memory(arg) for index, arg in enumerate(args) if isinstance(arg, ir.IRNode)}
    with V.graph.fake_mode:
        fakes = [ir.ir_node_to_tensor(boxes[index]) if index in boxes else arg for index, arg in enumerate(args)]
        _refuse(name, fakes)
        graph = traced_launches(name, fakes, options)
    (outputs,) = process_subgraph_nodes(graph, list(boxes.values()))
    return outputs


def traced_launches(name: str, args: list[Any], options: dict[str, Any]) -> torch.fx.GraphModule:
    """What the kernels of ``xent::name`` do with such tensors, from the tensors among ``args`` to [outputs].

    An operator that is made of others shows those: they are lowered in their turn.
    """
    from ..kernels.triton import launch
    from ..kernels.triton.recording import RECORDING

    operator, recording = OPERATORS[name], RECORDING.set(True)
    keywords = operator.keywords(options)
    places = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    try:
        if operator.composed:
            run = functools.partial(operator.reference, **keywords)
        else:
            run = getattr(launch, name)(*args, **keywords)

        def call(*tensors: torch.Tensor) -> list[Any]:
            given = dict(zip(places, tensors, strict=True))
            return [run(*[given.get(index, arg) for index, arg in enumerate(args)])]

        return make_fx(call)(*[args[index] for index in places])
    finally:
        RECORDING.reset(recording)


def _in_memory(arg: Any) -> Any:
    """The argument where it lies, its strides fixed."""
    from torch._inductor import ir

    box = ir.TensorBox(ir.ExternKernel.realize_input(arg))
    ir.as_storage_and_layout(box, freeze=True)
    return box


def _refuse(name: str, args: list[Any]) -> None:
    """Raise on what cannot be packed."""
    from torch._inductor import config

    if config.aot_inductor.emit_multi_arch_kernel:
        raise NotImplementedError("a package for several architectures cannot hold the kernels of xent_ops")
    if any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float64 for arg in args):
        # Inductor hands the options of a kernel over as float.
        raise NotImplementedError(f"xent::{name} cannot be packed for CUDA in float64")
    first = OPERATORS[name].arguments.index("logits") if "logits" in OPERATORS[name].arguments else 0
    logits = args[first]
    if isinstance(logits.shape[-1], torch.SymInt):
        raise NotImplementedError(f"xent::{name} cannot be packed with a dynamic number of classes")
