"""Lowers an operator on CUDA to the launches of its Triton kernels. This happens only in AOTInductor packages.

A package runs without Python, but Python compiles and launches our kernels. So the launcher is traced (recording.py),
and its allocations and launches replace the operator. The package then holds cubins and none of our operators.
Elsewhere the operator stays one opaque call.

The chunks of a linear cross entropy multiply with ``out=``. Inductor has no lowerings for that, because its graphs are
functionalised and have no ``out=``. They are here too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor import config, ir
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import process_subgraph_nodes
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..._private import unless_gone
from ...kernels import accelerators
from ...kernels.sizes import size_hint, symbolic
from ...ops.library import OPERATORS

aten = torch.ops.aten

# The dimension of classes in each argument. Its size selects the kernels, which support only that number of classes.
_CLASSES = {"logits": -1, "teacher_logits": -1, "grad": -1, "linear_weight": 0, "teacher_weight": 0}


@unless_gone("kernels in packages for CUDA", "AOTInductor makes none", lambda args: False)
def packs(args: tuple[Any, ...]) -> bool:
    """Is this call compiled for a package, with kernels that Python would launch?"""
    first = next(arg for arg in args if isinstance(arg, ir.IRNode))
    device = first.get_device()
    return V.graph.aot_mode and device is not None and device.type == accelerators.CUDA.type


def lower(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Lower a call of ``xent::name``."""
    boxes = {index: _in_memory(arg) for index, arg in enumerate(args) if isinstance(arg, ir.IRNode)}
    with V.graph.fake_mode:
        fakes = [ir.ir_node_to_tensor(boxes[index]) if index in boxes else arg for index, arg in enumerate(args)]
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

    operator, recording = OPERATORS[name], RECORDING.set(True)
    keywords = operator.keywords(options)
    positions = [index for index, arg in enumerate(args) if isinstance(arg, Tensor)]

    def call(*tensors: Tensor) -> list[Any]:
        named_args = dict(zip(positions, tensors, strict=True))
        all_args = [named_args.get(index, arg) for index, arg in enumerate(args)]
        if operator.calls_operators:
            return [operator.reference(*all_args, **keywords)]
        # Both stages of the launcher: the first computes with sizes.
        return [LAUNCHERS[name](*all_args, **keywords)(*all_args)]

    try:
        table = {op: by for op, by in select_decomp_table().items() if op not in PRODUCTS}
        traced = make_fx(call, table | {aten.addmm.dtype_out: _addmm_dtype})(*[args[index] for index in positions])
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
    box = ir.TensorBox(ir.ExternKernel.realize_input(arg))
    ir.as_storage_and_layout(box, freeze=True)
    return box


def refuse(name: str, args: list[Any], options: dict[str, Any]) -> None:
    """Raise for calls that cannot be packed."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    named_args = dict(zip(OPERATORS[name].arguments, args, strict=False))
    classes = [
        named_args[argument].shape[position] for argument, position in _CLASSES.items() if argument in named_args
    ]
    why = {
        # Inductor passes a kernel's options as float.
        "in float64": any(tensor.dtype == torch.float64 for tensor in tensors),
        "in a package for several architectures": config.aot_inductor.emit_multi_arch_kernel,
        "with skip_ignored": options.get("skip_ignored"),
        "with products of 8-bit numbers": options.get("products"),
        "with a dynamic number of classes": any(map(symbolic, classes)),
        "with batch_invariant and a dynamic number of rows, which needs a loop over chunks of one shape": (
            "linear_weight" in named_args
            and options.get("batch_invariant")
            and any(symbolic(size) for tensor in tensors for size in tensor.shape)
        ),
        "with a number of rows that depends on data, as that of logits[target != ignore_index] does; hand over all "
        "rows: ignored ones are left out of the loss": free_unbacked_symbols(tensors),
        "traced without rows, for which nothing is launched: trace with a usual number of them": any(
            symbolic(size) and size_hint(size) == 0 for tensor in tensors for size in tensor.shape
        ),
    }
    for reason, holds in why.items():
        if holds:
            raise NotImplementedError(f"xent::{name} cannot be packed for CUDA {reason}")


class _Into(ir.MutatingFirstArgExternKernel):
    """A call of AOTInductor's C function ``aoti_torch_DEVICE_name(out, tensors..., numbers...)``."""

    def __init__(self, name: str, tensors: list[Any], numbers: tuple[Any, ...]) -> None:
        device = tensors[0].get_device()
        inputs = self.unwrap_storage([_bound(ir.ExternKernel.realize_input(tensor)) for tensor in tensors])
        super().__init__(None, ir.NoneLayout(device=device), inputs, constant_args=numbers)
        self.device_type, self.cpp_kernel_name = device.type, f"aoti_torch_{device.type}_{name}"
        V.graph.mark_buffer_mutated(tensors[0].get_name())
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def codegen(self, wrapper: Any) -> None:
        arguments = [tensor.codegen_reference() for tensor in self.inputs]  # type: ignore[union-attr]
        arguments += [wrapper.val_to_arg_str(number) for number in self.constant_args]
        wrapper.generate_c_shim_extern_kernel_call(self.cpp_kernel_name, arguments, self.device_type)


def _bound(tensor: Any) -> Any:
    """The tensor, tied to the buffer that it has now: a later in-place operation gives a new one to its views."""
    if not isinstance(tensor, ir.ReinterpretView):
        return tensor
    storage: Any = tensor.unwrap_view()
    return ir.ReinterpretView(data=ir.StorageBox(storage.data), layout=tensor.layout)


def _into(name: str, tensors: list[Any], *numbers: Any) -> Any:
    _Into(name, tensors, numbers)
    return tensors[0]


PRODUCTS: dict[Any, Any] = {
    aten.mm.out: lambda left, right, *, out: _into("mm_out", [out, left, right]),
    aten.mm.dtype_out: lambda left, right, out_dtype, *, out: _into("mm_dtype_out", [out, left, right], out_dtype),
    # The numbers are beta and alpha.
    aten.addmm.out: lambda total, left, right, *, out: _into("addmm_out", [out, total, left, right], 1.0, 1.0),
}


def _addmm_dtype(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """AOTInductor has no C function for addmm with a dtype, and torch 2.11 has no fake for it."""
    return out.copy_(total + torch.mm(left, right, out_dtype=out_dtype))
