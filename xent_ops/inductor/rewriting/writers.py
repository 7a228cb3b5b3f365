"""Finds the nodes that may write to memory that the loss or its backward reads. A missed writer means wrong numbers.

An operator with a schema writes what the schema says. Any other callable that is not known to be pure is assumed to
write to every tensor among its arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .nodes import PYTHON_WRITERS, share_memory, storage_of, value_of

# Methods and functions in C++ that have no schema and write nothing.
_PURE = {
    "as_subclass", "asarray", "bfloat16", "bool", "byte", "cdouble", "cfloat", "char", "cpu", "cuda", "dim",
    "dim_order", "double", "element_size", "float", "half", "int", "ipu", "is_shared", "long", "mtia", "ndimension",
    "nelement", "new", "new_tensor", "short", "size", "stride", "to_sparse_coo", "tolist", "type", "unique", "xpu",
    "has_names", "get_device", "storage_offset",
}  # fmt: skip
_PURE_BUILTINS = {
    "abs", "bool", "float", "getattr", "hasattr", "int", "isinstance", "len", "max", "min", "round", "sum",
}  # fmt: skip
# Modules of pure functions; out= is checked separately. Functorch's functions wrap a tensor, and a write to the wrapper
# is found.
_PURE_MODULES = {"_operator", "math", "torch", "torch.functional"}
_FUNCTORCH = ("torch._functorch.", "torch._C._functorch")
_NN_FUNCTIONS = {id(function) for function in vars(F).values() if callable(function)}


def between(
    first: fx.Node, last: fx.Node, memory: Tensor, inputs: list[Tensor], harmless: set[fx.Node]
) -> fx.Node | None:
    """A node between ``first`` and ``last`` that may write to ``memory`` and is not in ``harmless``.

    Two inputs of the graph may be views of one tensor. Their fake tensors do not show that. So an input counts as a
    view of every other input of its dtype (torch refuses such views of two dtypes). Aliases made in the graph are
    known.
    """
    is_input = any(share_memory(memory, one) for one in inputs)
    node = first.next
    while node is not last:
        for written in () if node in harmless else _tensors([value_of(one) for one in written_by(node)]):
            if _may_share(written, memory):
                return node
            if is_input and written.dtype == memory.dtype and any(share_memory(written, one) for one in inputs):
                return node
        node = node.next
    return None


def after(loss: fx.Node, saved: Tensor) -> fx.Node | None:
    """A node after the loss that may write to a tensor that our backward reads.

    The backward of F.cross_entropy reads other tensors. So autograd may accept the model, and refuse it with our
    operator.
    """
    for node in reversed(loss.graph.nodes):
        if node is loss:
            return None
        if any(_may_share(one, saved) for one in _tensors([value_of(one) for one in written_by(node)])):
            return node
    return None


def inputs_of(graph: fx.Graph) -> list[Tensor]:
    """Tensors that may alias in a way that fake tensors do not show: inputs, and the results of opaque calls."""
    found: list[Tensor] = []
    for node in graph.nodes:
        opaque = node.op in ("placeholder", "get_attr", "call_module")
        if opaque or isinstance(node.target, torch._ops.HigherOrderOperator):
            found += _tensors(value_of(node))
    return found


def _may_share(written: Tensor, memory: Tensor) -> bool:
    return storage_of(written) is None or share_memory(written, memory)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors among the inputs of ``node`` that it may write to."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    return [one for one in _written(node) if _tensors(value_of(one))]


def _written(node: fx.Node) -> list[fx.Node]:
    target: Any = node.target
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        return node.all_input_nodes  # their bodies are not examined
    if str(target).startswith("inductor.resize_storage_bytes_"):  # tensor.untyped_storage().resize_(), as by FSDP
        return _nodes(node.args[:1])  # its schema does not say so
    if isinstance(target, torch._ops.OpOverload):
        return _by_schemas(node, [target._schema])
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _by_schemas(node, [getattr(target, overload)._schema for overload in target.overloads()])
    out = _nodes(node.kwargs.get("out"))
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in PYTHON_WRITERS:
        return _nodes(node.args[:1])
    in_cpp = isinstance(target, (str, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType))
    module = getattr(target, "__module__", None) or ""
    if module.startswith(_FUNCTORCH):
        return []
    if in_cpp and module not in ("_operator", "builtins", "math"):
        if schemas := _schemas(name):
            return _by_schemas(node, schemas)
        return out if name in _PURE else node.all_input_nodes
    if module == "builtins":
        return [] if name in _PURE_BUILTINS else node.all_input_nodes
    if id(target) in _NN_FUNCTIONS:
        return out + _by_signature(node)
    return out if module in _PURE_MODULES else node.all_input_nodes


@functools.cache
def _schemas(name: str) -> tuple[Any, ...]:
    return tuple(torch._C._jit_get_schemas_for_operator(f"aten::{name}"))


def _by_schemas(node: fx.Node, schemas: Iterable[Any]) -> list[fx.Node]:
    """The arguments that any of these overloads writes to."""
    found: list[fx.Node] = []
    for schema in schemas:
        for index, argument in enumerate(schema.arguments):
            annotated = argument.alias_info is not None and argument.alias_info.is_write
            # batch_norm writes its statistics. Its schema does not say so.
            if not annotated and not argument.name.startswith("running_"):
                continue
            if not argument.kwarg_only:
                found += _nodes(node.args[index : index + 1])
            # Python passes the results of an operator with several as one tuple ``out``.
            found += _nodes((node.kwargs.get(argument.name), node.kwargs.get("out") if argument.is_out else None))
    return found


def _by_signature(node: fx.Node) -> list[fx.Node]:
    """The arguments that a function of torch.nn.functional writes to, as inplace, max_norm and running_* tell."""
    target: Any = node.target
    try:
        bound_args = inspect.signature(target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # it only forwards (*args, **kwargs)
        return node.all_input_nodes if node.kwargs.get("inplace") else []
    found = _nodes([value for name, value in bound_args.items() if name.startswith("running_")])
    if bound_args.get("inplace"):
        found += _nodes(next(iter(bound_args.values())))
    if bound_args.get("max_norm") is not None:
        found += _nodes(bound_args.get("weight"))
    return found


def _nodes(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in _tensors(part)] if isinstance(value, (list, tuple)) else []
