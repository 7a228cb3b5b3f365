"""The float32 copy of the logits that models make for the loss alone, and how to do without it.

The kernels compute in float32 whatever they read, so ``F.cross_entropy(logits.float().view(-1, V), target)`` gives the
same numbers from the bfloat16 logits, and half of the memory traffic. The graph here is Dynamo's: torch functions and
methods, neither functional nor normalised, so everything that could write to the logits in between keeps the upcast.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

_HALF = (torch.bfloat16, torch.float16)
_CASTS = {"float", "to", "type"}
# They only choose or rearrange elements, each at most once: nothing is summed in their backward, which therefore
# rounds as much in bfloat16 as in float32. expand and index tensors are not among them.
_VIEWS = {
    "contiguous", "flatten", "movedim", "narrow", "permute", "reshape", "select", "squeeze", "swapaxes", "swapdims",
    "t", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip


class Upcast(NamedTuple):
    source: fx.Node  # the logits before the upcast
    views: list[fx.Node]  # from the upcast to the loss
    nodes: list[fx.Node]  # what is dead without the upcast, the last use first


def value_of(node: Any) -> Any:
    """The fake tensor that a node makes; what is no node is itself."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def find(loss: fx.Node, logits: fx.Node) -> Upcast | str | None:
    """The upcast that ``logits`` come from through views, why it must stay, or None where there is none."""
    nodes: list[fx.Node] = []
    views: list[fx.Node] = []
    node = logits
    while not _is_upcast(node):
        name = _name(node)
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not isinstance(value_of(source), Tensor):
            return None
        nodes.append(node)
        if name in _CASTS and _same_tensor(value_of(source), value_of(node)):
            pass  # .float() of what is float32 already
        elif _is_view(node, name):
            views.insert(0, node)
        else:
            return None
        node = source
    nodes.append(node)
    for shared in nodes:
        if len(shared.users) > 1:
            return f"its float32 upcast stays: {shared.name} has {len(shared.users)} uses"
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if any(value_of(made).requires_grad != value_of(source).requires_grad for made in nodes):
        return "its float32 upcast stays: made without gradients"
    writer = _writer_between(node, loss, value_of(source))
    if writer is not None:
        return f"its float32 upcast stays: {writer.name} may write to the logits between it and the loss"
    return Upcast(source, views, nodes)


def _name(node: fx.Node) -> str | None:
    """``x.view(...)`` and ``torch.reshape(x, ...)`` alike; None for what is neither method nor function of torch."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return "getitem"
    name = getattr(node.target, "__name__", "")
    return name if getattr(torch, name, None) is node.target or getattr(Tensor, name, None) is node.target else None


def _is_upcast(node: fx.Node) -> bool:
    if _name(node) not in _CASTS or not node.args:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    return (
        isinstance(node.args[0], fx.Node)
        and isinstance(before, Tensor)
        and before.dtype in _HALF
        and after.dtype == torch.float32
        and after.device == before.device
    )


def _same_tensor(before: Tensor, after: Tensor) -> bool:
    return before.dtype == after.dtype and before.device == after.device


def _is_view(node: fx.Node, name: str | None) -> bool:
    if not isinstance(value_of(node), Tensor) or value_of(node).dtype != value_of(node.args[0]).dtype:
        return False  # view(dtype) reads the bits as something else
    if name == "getitem":
        index = node.args[1]
        return all(_is_basic(part) for part in (index if isinstance(index, tuple) else (index,)))
    others = [n for n in node.all_input_nodes if n is not node.args[0]]
    return name in _VIEWS and not any(isinstance(value_of(n), Tensor) for n in others)


def _is_basic(part: Any) -> bool:
    """Part of an index that makes a view, not a gather."""
    if isinstance(part, slice):
        return all(_is_basic(bound) for bound in (part.start, part.stop, part.step))
    part = value_of(part)
    return part is None or part is Ellipsis or (isinstance(part, (int, torch.SymInt)) and not isinstance(part, bool))


def _writer_between(first: fx.Node, last: fx.Node, source: Tensor) -> fx.Node | None:
    """A node that may write to memory of ``source``: the loss would read what the upcast had not. Wrong numbers, so
    nothing is taken for granted here."""
    node = first.next
    while node is not last:
        if _writes(node):
            # Labels are written in place often (``labels[mask] = -100``). Other memory and another dtype: two inputs
            # of the graph may be views of one tensor without the fake tensors knowing it, but not as other dtypes.
            plain = isinstance(node.target, str) or not isinstance(node.target, torch._ops.OperatorBase)
            plain = plain and node.kwargs.get("out") is None  # then the first argument is read
            written = value_of(node.args[0]) if plain and node.args else None
            if not isinstance(written, Tensor) or written.dtype == source.dtype or _share_memory(written, source):
                return node
        node = node.next
    return None


def writer_after(loss: fx.Node, saved: list[Tensor]) -> fx.Node | None:
    """A node that writes, after the loss, to what our backward reads. That of F.cross_entropy reads other tensors, so
    autograd would refuse to compile what it compiles."""
    if not any(tensor.requires_grad for tensor in saved):
        return None
    for node in reversed(loss.graph.nodes):
        if node is loss:
            return None
        inputs = [one for one in map(value_of, node.all_input_nodes) if isinstance(one, Tensor)]
        if _writes(node) and any(_share_memory(one, tensor) for one in inputs for tensor in saved):
            return node
    return None


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _writes(node: fx.Node) -> bool:
    """May this node write to one of its inputs?"""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    target = node.target
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        return True  # not worth a look inside
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, overload)._schema.is_mutable for overload in target.overloads())
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return (
        (name.endswith("_") and not name.startswith("_"))  # x.add_(1), F.relu_(x)
        or name.startswith("__i")
        or name in _WRITING_OPERATORS
        or node.kwargs.get("out") is not None
        or _asked_in_place(node)
    )


_WRITING_OPERATORS = {
    "setitem", "__setitem__", "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow",
    "irshift", "isub", "itruediv", "ixor",
}  # fmt: skip


def _asked_in_place(node: fx.Node) -> bool:
    """``F.relu(x, inplace=True)``, also by position."""
    if isinstance(node.target, str):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # a builtin without signature
        return bool(node.kwargs.get("inplace"))
    return bool(bound.arguments.get("inplace"))
