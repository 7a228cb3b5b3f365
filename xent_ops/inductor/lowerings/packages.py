"""Lowers an operator on CUDA to the launches of its Triton kernels. This happens only in AOTInductor packages.

A package runs without Python, but Python compiles and launches our kernels. So the launcher is traced (recording.py),
and its allocations and launches replace the operator. The package then holds cubins and none of our operators.
Elsewhere the operator stays one opaque call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config
from torch._inductor.ir import ExternKernel, IRNode, TensorBox, as_storage_and_layout, ir_node_to_tensor
from torch._inductor.lowering import process_subgraph_nodes
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..._private import unless_gone
from ...kernels import accelerators
from ...kernels.sizes import size_hint, symbolic
from ...ops.library import OPERATORS

# The dimension of classes in each argument. Its size selects the kernels, which support only that number of classes.
_CLASSES = {"logits": -1, "teacher_logits": -1, "grad": -1, "linear_weight": 0, "teacher_weight": 0}


@unless_gone("kernels in packages for CUDA", "AOTInductor makes none", lambda args: False)
def packs(args: tuple[Any, ...]) -> bool:
    """Is this call compiled for a package, with kernels that Python would launch?"""
    first = next(arg for arg in args if isinstance(arg, IRNode))
    device = first.get_device()
    return V.graph.aot_mode and device is not None and device.type == accelerators.CUDA.type


def lower(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Lower a call of ``xent::name``."""
    boxes = {index: _in_memory(arg) for index, arg in enumerate(args) if isinstance(arg, IRNode)}
    with V.graph.fake_mode:
        fakes = [ir_node_to_tensor(boxes[index]) if index in boxes else arg for index, arg in enumerate(args)]
        refuse(name, fakes, options)
        graph = traced_launches(name, fakes, options)
    (outputs,) = process_subgraph_nodes(graph, list(boxes.values()))
    return outputs


def traced_launches(name: str, args: list[Any], options: dict[str, Any]) -> torch.fx.GraphModule:
    """A trace of the launches of ``xent::name``, from the tensors among ``args`` to [outputs].

    If an operator calls other operators, the trace has these operators, and they are lowered in turn.
    """
    from ...kernels.triton.launch import LAUNCHERS
    from ...kernels.triton.recording import RECORDING
    from . import products_into

    operator, recording = OPERATORS[name], RECORDING.set(True)
    keywords = operator.keywords(options)
    positions = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> list[Any]:
        named_args = dict(zip(positions, tensors, strict=True))
        all_args = [named_args.get(index, arg) for index, arg in enumerate(args)]
        if operator.calls_operators:
            return [operator.reference(*all_args, **keywords)]
        # Both stages of the launcher: the first computes with sizes.
        return [LAUNCHERS[name](*all_args, **keywords)(*all_args)]

    try:
        traced = make_fx(call, products_into.decompositions())(*[args[index] for index in positions])
    finally:
        RECORDING.reset(recording)
    traced.graph.eliminate_dead_code(_has_effects)  # the first stage creates tensors without memory
    return traced


def _has_effects(node: torch.fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator)  # a launch


def _in_memory(arg: Any) -> Any:
    """The argument in memory, with fixed strides."""
    box = TensorBox(ExternKernel.realize_input(arg))
    as_storage_and_layout(box, freeze=True)
    return box


def refuse(name: str, args: list[Any], options: dict[str, Any]) -> None:
    """Raise for calls that cannot be packed."""
    if config.aot_inductor.emit_multi_arch_kernel:
        raise NotImplementedError("a package for several architectures cannot hold the kernels of xent_ops")
    if any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float64 for arg in args):
        # Inductor passes a kernel's options as float.
        raise NotImplementedError(f"xent::{name} cannot be packed for CUDA in float64")
    if options.get("skip_ignored"):
        raise NotImplementedError(f"xent::{name} cannot be packed for CUDA with skip_ignored")
    if options.get("products"):
        raise NotImplementedError(f"xent::{name} cannot be packed for CUDA with products of 8-bit numbers")
    named_args = dict(zip(OPERATORS[name].arguments, args, strict=False))
    classes = [
        named_args[argument].shape[position] for argument, position in _CLASSES.items() if argument in named_args
    ]
    if any(isinstance(size, torch.SymInt) for size in classes):
        raise NotImplementedError(f"xent::{name} cannot be packed for CUDA with a dynamic number of classes")
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if free_unbacked_symbols(tensors):
        raise NotImplementedError(
            f"xent::{name} cannot be packed for CUDA with a number of rows that depends on data, as that of "
            "logits[target != ignore_index] does; hand over all rows: ignored ones are left out of the loss"
        )
    if any(symbolic(size) and size_hint(size) == 0 for tensor in tensors for size in tensor.shape):
        raise NotImplementedError(
            f"xent::{name} cannot be packed for CUDA traced without rows, for which nothing is launched: trace with a "
            "usual number of them"
        )
