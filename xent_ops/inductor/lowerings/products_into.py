"""Lowerings of torch's products with ``out=``, which the chunks of a linear cross entropy use.

A functionalised graph has no ``out=``, so Inductor has no lowerings for these products. The trace of our operators for
a package has them (packages.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

aten = torch.ops.aten


class _Into(ir.MutatingFirstArgExternKernel):
    """A call of AOTInductor's C function ``aoti_torch_DEVICE_name(out, tensors..., numbers...)``."""

    def __init__(self, name: str, tensors: list[Any], numbers: tuple[Any, ...] = ()) -> None:
        device = tensors[0].get_device()
        inputs = self.unwrap_storage([ir.ExternKernel.realize_input(tensor) for tensor in tensors])
        super().__init__(None, ir.NoneLayout(device=device), inputs, constant_args=numbers)
        self.device_type, self.cpp_kernel_name = device.type, f"aoti_torch_{device.type}_{name}"
        V.graph.mark_buffer_mutated(tensors[0].get_name())
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def codegen(self, wrapper: Any) -> None:
        arguments = [tensor.codegen_reference() for tensor in self.inputs]  # type: ignore[union-attr]
        arguments += [wrapper.val_to_arg_str(number) for number in self.constant_args]
        wrapper.generate_c_shim_extern_kernel_call(self.cpp_kernel_name, arguments, self.device_type)


def _mm(left: Any, right: Any, *, out: Any) -> Any:
    _Into("mm_out", [out, left, right])
    return out


def _mm_dtype(left: Any, right: Any, out_dtype: torch.dtype, *, out: Any) -> Any:
    _Into("mm_dtype_out", [out, left, right], (out_dtype,))
    return out


def _addmm(total: Any, left: Any, right: Any, *, out: Any) -> Any:
    _Into("addmm_out", [out, total, left, right], (1.0, 1.0))  # beta and alpha
    return out


def _addmm_dtype(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """AOTInductor has no C function for addmm with a dtype, and torch 2.11 has no fake for it."""
    return out.copy_(total + torch.mm(left, right, out_dtype=out_dtype))


LOWERINGS: dict[Any, Any] = {
    aten.mm.out: _mm,
    aten.mm.dtype_out: _mm_dtype,
    aten.addmm.out: _addmm,
}


def decompositions() -> dict[Any, Any]:
    """Inductor's decompositions, without the products that are lowered here."""
    table = {op: by for op, by in select_decomp_table().items() if op not in LOWERINGS}
    return table | {aten.addmm.dtype_out: _addmm_dtype}


def install() -> None:
    """Register the lowerings without register_lowering, because it refuses ``out=``."""
    for op, lowering in LOWERINGS.items():
        lowerings[op] = lowering
