"""F.cross_entropy in a graph of Dynamo's, replaced by ``torch.ops.xent`` and the views around it.

The new nodes are operators and methods of torch, no functions of ours: torch caches compiled graphs of those alone.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from ..ops import checks
from . import upcast
from .report import Call
from .upcast import value_of

_SIGNATURE = inspect.signature(F.cross_entropy)
_KNOWN = {"input", "target", "weight", "ignore_index", "reduction", "label_smoothing"}
_LEGACY = ("size_average", "reduce")


class _LeftAlone(Exception):
    """Why a call is not replaced."""


def replace_cross_entropy(graph: fx.Graph) -> list[Call]:
    """Replace what can be, in place, and say what became of each call."""
    calls = []
    for node, transformed in _losses(graph):
        if node.op == "call_module":
            calls.append(Call(_where(node), "nn.CrossEntropyLoss", False, why="Dynamo did not inline this module"))
            continue
        given = _SIGNATURE.bind(*node.args, **node.kwargs).arguments
        what = _describe(given)
        try:
            if transformed:
                raise _LeftAlone("it is inside a torch.func transform")
            _refuse(given)
            removed, why = _replace(node, given)
            calls.append(Call(_where(node), what, True, removed, why))
        except _LeftAlone as reason:
            calls.append(Call(_where(node), what, False, why=str(reason)))
    return calls


def _losses(graph: fx.Graph) -> Iterator[tuple[fx.Node, bool]]:
    """(call, is it inside a functorch transform or a level of forward-mode AD) for each call of the loss."""
    depth = 0
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if name.endswith("increment_nesting") or name == "_enter_dual_level":
            depth += 1
        elif name.endswith("decrement_nesting") or name == "_exit_dual_level":
            depth -= 1
        elif _is_loss(node):
            yield node, depth > 0


def _is_loss(node: fx.Node) -> bool:
    if node.op != "call_module":
        return node.op == "call_function" and node.target is F.cross_entropy
    owner = node.graph.owning_module
    return owner is not None and isinstance(owner.get_submodule(str(node.target)), torch.nn.CrossEntropyLoss)


def _refuse(given: dict[str, Any]) -> None:
    """Raise _LeftAlone for what our operators do not take, or take otherwise than F.cross_entropy."""
    for name in _LEGACY:
        if given.get(name) is not None:
            raise _LeftAlone(f"the deprecated argument {name} is given; use reduction")
    for name in given:
        if name not in _KNOWN and name not in _LEGACY:
            raise _LeftAlone(f"the argument {name} is unknown to xent_ops")
    for name in ("input", "target", "weight"):
        tensor = value_of(given.get(name))
        if name == "weight" and tensor is None:
            continue
        if not isinstance(tensor, FakeTensor):
            raise _LeftAlone(f"{name} is a {type(tensor).__name__}, not a plain tensor")
        valid = checks.FLOATS if name != "target" else checks.FLOATS + checks.INDICES
        if tensor.dtype not in valid:
            raise _LeftAlone(f"{name} has dtype {tensor.dtype}")
    logits, target = value_of(given["input"]), value_of(given["target"])
    soft = _is_soft(logits, target)
    if isinstance(given.get("label_smoothing"), fx.Node):
        raise _LeftAlone("label_smoothing is computed in the graph")
    ignore_index = value_of(given.get("ignore_index", -100))
    if soft and not (isinstance(ignore_index, int) and ignore_index < 0):
        raise _LeftAlone("ignore_index does not go with class probabilities")
    weight = value_of(given.get("weight"))
    if not soft and weight is not None and weight.requires_grad:
        raise _LeftAlone("weight requires grad, which has no derivative; torch says so")
    operation = "xent::soft_cross_entropy_forward" if soft else "xent::cross_entropy_forward"
    key = torch._C._dispatch_key_for_device(logits.device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operation, key):
        raise _LeftAlone(f"xent_ops has no kernel for the device {logits.device.type}")


def _is_soft(logits: Tensor, target: Tensor) -> bool:
    return target.dim() == logits.dim()


class _Emitter:
    """Makes nodes in front of the loss, each with the fake tensor it stands for."""

    def __init__(self, loss: fx.Node) -> None:
        self.loss = loss
        self.made: list[fx.Node] = []
        self.fake_mode = value_of(loss).fake_mode
        self.meta: dict[str, Any] = {
            key: loss.meta[key]
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "mutation_region_id")
            if key in loss.meta
        }

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        values = fx.node.map_arg((args, kwargs), value_of)
        with self.fake_mode:  # for the constants inside our composite operator
            if isinstance(target, str):
                value = getattr(values[0][0], target)(*values[0][1:], **values[1])
            else:
                value = target(*values[0], **values[1])
        with self.loss.graph.inserting_before(self.loss):
            make = self.loss.graph.call_method if isinstance(target, str) else self.loss.graph.call_function
            node = make(target, args, kwargs)
        node.meta = {**self.meta, "example_value": value}
        self.made.append(node)
        return node

    def undo(self) -> None:
        for node in reversed(self.made):
            node.graph.erase_node(node)


def _replace(loss: fx.Node, given: dict[str, Any]) -> tuple[bool, str]:
    """(is the upcast gone, why it stayed)."""
    found = upcast.find(loss, given["input"])
    if isinstance(found, upcast.Upcast):
        emit = _Emitter(loss)
        try:
            result = _emit_loss(emit, _without_upcast(emit, found), given)
        except Exception as error:  # a view of the upcast that its source cannot do
            emit.undo()
            found = f"its float32 upcast stays: {_first_line(error)}"
        else:
            _substitute(loss, result)
            for node in found.nodes:
                if not node.users:  # it still has one where it is the target as well
                    node.graph.erase_node(node)
            return True, ""
    emit = _Emitter(loss)
    try:
        result = _emit_loss(emit, given["input"], given)
    except Exception as error:
        emit.undo()
        raise _LeftAlone(_first_line(error)) from error
    _substitute(loss, result)
    return False, found or ""


def _substitute(loss: fx.Node, result: fx.Node) -> None:
    result.meta["example_value"] = value_of(loss)
    loss.replace_all_uses_with(result)
    loss.graph.erase_node(loss)


def _without_upcast(emit: _Emitter, found: upcast.Upcast) -> fx.Node:
    """The views again, of the logits before the upcast."""
    node = found.source
    for view in found.views:
        target = view.target
        if target == "view":
            # The upcast of a slice was dense, the slice is not: where it cannot be viewed, reshape copies it.
            target = "reshape"
        node = emit(target, node, *view.args[1:], **view.kwargs)
    return node


def _classes_last(emit: _Emitter, tensor: fx.Node) -> fx.Node:
    if value_of(tensor).dim() <= 2:
        return tensor
    tensor = emit("movedim", tensor, 1, -1)
    # Dense already where the model made its (N, C, d1) by transposing.
    return tensor if value_of(tensor).stride(-1) == 1 else emit("contiguous", tensor)


def _emit_loss(emit: _Emitter, logits: fx.Node, given: dict[str, Any]) -> fx.Node:
    weight, reduction = given.get("weight"), given.get("reduction", "mean")
    smoothing = given.get("label_smoothing", 0.0)
    logits = _classes_last(emit, logits)
    soft = _is_soft(value_of(logits), value_of(given["target"]))
    target = _classes_last(emit, given["target"]) if soft else given["target"]
    # Targets and weights of class indices are saved by torch as well, and have no gradient.
    saved = [value_of(tensor) for tensor in (logits, *((target, weight) if soft else ())) if tensor is not None]
    writer = upcast.writer_after(emit.loss, saved)
    if writer is not None:
        what = "the logits, the target or the weight" if soft else "the logits"
        raise _LeftAlone(f"{writer.name} writes to {what} after the loss, whose backward needs them")
    if not soft:
        loss = emit(
            torch.ops.xent.cross_entropy.default,
            logits,
            target,
            weight,
            ignore_index=given.get("ignore_index", -100),
            label_smoothing=smoothing,
            reduction=reduction,
        )
    else:
        rows = emit(
            torch.ops.xent.soft_cross_entropy_forward.default, logits, target, weight, label_smoothing=smoothing
        )
        loss = emit(operator.getitem, rows, 0)
        if reduction != "none":
            loss = emit(reduction, loss)  # the methods sum and mean
    wanted = value_of(emit.loss)
    if value_of(loss).shape != wanted.shape:
        raise _LeftAlone(f"ours would have shape {tuple(value_of(loss).shape)}, not {tuple(wanted.shape)}")
    # F.cross_entropy returns the logits' dtype, float32 under autocast; ours float32.
    return loss if value_of(loss).dtype == wanted.dtype else emit("to", loss, wanted.dtype)


def _first_line(error: Exception) -> str:
    if isinstance(error, _LeftAlone):
        return str(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _describe(given: dict[str, Any]) -> str:
    logits = value_of(given["input"])
    given_options = {name: given.get(name) for name in (*_LEGACY, "reduction", "label_smoothing")}
    options = [f"{name}={option!r}" for name, option in given_options.items() if option is not None]
    if given.get("weight") is not None:
        options.append("weight")
    if not isinstance(logits, Tensor):
        return ", ".join([type(logits).__name__, *options])
    shape = ", ".join(map(str, logits.shape))
    return ", ".join([f"{str(logits.dtype).removeprefix('torch.')} ({shape})", *options])


def _where(node: fx.Node) -> str:
    """The innermost frame outside torch: nn.CrossEntropyLoss is called from somewhere."""
    frames = re.findall(r'File "(.+)", line (\d+), in (\S+)', (node.stack_trace or "").replace("\\", "/"))
    outside = [frame for frame in frames if not frame[0].endswith("torch/nn/modules/loss.py")]
    if not outside:
        return "unknown place"
    file, line, function = outside[-1]
    return f"{file}:{line} in {function}"
