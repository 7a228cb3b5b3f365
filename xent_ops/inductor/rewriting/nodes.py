"""Queries about a node of a Dynamo graph: its value, its name, its memory.

The graph holds torch functions, methods and Python operators, neither functional nor normalised.
"""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from ...kernels.sizes import size_hint

_PACKAGE = Path(__file__).parents[2]
_LOSSES = (
    "torch/nn/modules/loss.py", "torch/nn/functional.py",
    *(str(_PACKAGE / name) for name in ("functional.py", "modules.py", "ops/arguments.py", "ops/function.py")),
)  # fmt: skip
_OWNERS = (torch, Tensor, operator, F, torch._C._nn)

# The names of Python's operators in aten.
_ARITHMETIC = {
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and_": "bitwise_and", "or_": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "pos": "positive",
    "inv": "bitwise_not", "invert": "bitwise_not",
}  # fmt: skip
_INPLACE_ARITHMETIC = {
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv",
    "ixor",
}  # fmt: skip
PYTHON_WRITERS = {"setitem", "__setitem__", "delitem", *_INPLACE_ARITHMETIC}

# Pointwise, but without aten's tag for it.
_ALSO_POINTWISE = {
    "alpha_dropout", "copy_", "dropout", "feature_alpha_dropout", "masked_fill_", "setitem", "__setitem__",
}  # fmt: skip


class LeftAlone(Exception):
    """Why a call is not replaced."""


def value_of(node: Any) -> Any:
    """The fake tensor of a node. Anything else is returned unchanged."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def refuse_foreign(tensors: dict[str, Any]) -> None:
    """Raise LeftAlone for a subclass of Tensor, and for a device without our operators: it has all of them or none."""
    for name, tensor in tensors.items():
        value = value_of(tensor)
        if not isinstance(value, FakeTensor):
            raise LeftAlone(f"{name} is a {type(value).__name__}, not a plain tensor")
        key = torch._C._dispatch_key_for_device(value.device.type)
        if not torch._C._dispatch_has_kernel_for_dispatch_key("xent::cross_entropy_forward", key):
            raise LeftAlone(f"xent_ops has no kernel for the device {value.device.type}")


def name_of(node: fx.Node) -> str | None:
    """The same name for ``x.reshape(...)`` and ``torch.reshape(x, ...)``.

    None if a node is no method, torch function, Python operator, or property ``T`` or ``mT``.
    """
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return None
    target = node.target
    if target is getattr and node.args[1] in ("T", "mT"):
        return str(node.args[1])
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        if name == "numpy_T":  # the property T, as torch 2.15 traces it
            name = "T"
        return name if namespace == "aten" else None
    name = getattr(target, "__name__", "")
    return name if any(getattr(owner, name, None) is target for owner in _OWNERS) else None


def hint(size: Any) -> Any:
    """The current number of a symbolic size."""
    if (now := size_hint(size)) is None:
        raise LeftAlone(f"the size {size} is not known")
    return now


def storage_of(value: Any) -> int | None:
    """An identifier of the storage. None for values that are no tensors, and for transforms' wrappers."""
    try:
        return int(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
    except (NotImplementedError, RuntimeError):
        return None


def share_memory(a: Any, b: Any) -> bool:
    """Are both tensors known to have the same storage?"""
    storage = storage_of(a)
    return storage is not None and storage == storage_of(b)


def is_pointwise(node: fx.Node) -> bool:
    """Does Inductor fuse this, element by element, into the kernel that reads the result? Decided by aten's tag."""
    name = name_of(node)
    if name is None:
        return False
    if name in _INPLACE_ARITHMETIC:
        name = name.removeprefix("i")
    name = _ARITHMETIC.get(name, name)
    if name in _ALSO_POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def is_cast(node: fx.Node) -> bool:
    """Does this node give its first argument another dtype (or the same), and nothing else?"""
    return name_of(node) in _CASTS and bool(node.args) and isinstance(value_of(node.args[0]), Tensor)


_CASTS = {"bfloat16", "double", "float", "half", "to", "type", "type_as"}


def viewed_by(node: fx.Node) -> fx.Node | None:
    """The node whose memory ``node`` is a view of, if it is one."""
    result = value_of(node)
    if node.op not in ("call_function", "call_method"):
        return None
    return next((one for one in maker_of(node).all_input_nodes if share_memory(value_of(one), result)), None)


def maker_of(node: fx.Node) -> fx.Node:
    """The node with several results, such as split, that ``node`` is one result of; otherwise ``node`` itself."""
    source = node.args[0] if name_of(node) == "getitem" else None
    return source if isinstance(source, fx.Node) and not isinstance(value_of(source), Tensor) else node


def position(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(graph.nodes)}


def where(node: fx.Node) -> str:
    """The innermost frame outside torch's losses and ours: the place that calls nn.CrossEntropyLoss, for example."""
    frames = re.findall(r'File "(.+)", line (\d+), in (\S+)', (node.stack_trace or "").replace("\\", "/"))
    outside = [frame for frame in frames if not frame[0].endswith(_LOSSES)]
    if not outside:
        return "unknown place"
    file, line, function = outside[-1]
    return f"{file}:{line} in {function}"
