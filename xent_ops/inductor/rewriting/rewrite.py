"""Replaces cross entropy in a Dynamo graph by ``torch.ops.xent`` operators and views.

The new nodes are operators and methods of torch, not our functions, because torch caches graphs of those only.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from torch import Tensor, fx

from ...kernels import sizes
from ...kernels.options import Activation
from ...ops import checks
from . import by_hand, head, other_forms, tail
from .emitter import Emitter
from .head import Heads
from .losses import Loss, losses
from .modes import modes
from .nodes import LeftAlone, refuse_foreign, value_of, where
from .path import Path
from .report import Call

_KNOWN = {"input", "target", "weight", "ignore_index", "reduction", "label_smoothing"}
_KNOWN |= {*Activation._fields, "lse_square_scale"}  # of our own loss


def replace_cross_entropy(graph: fx.Graph, heads: Heads) -> list[Call]:
    """Replace losses in the graph, in place, and return a record of each call."""
    calls = []
    reported: set[fx.Node] = set()
    for loss in itertools.chain(losses(graph), by_hand.losses(graph)):
        call = _replace(loss, heads, Call(where(loss.node), _describe(loss), False))
        if call is not None:
            calls.append(call)
            reported |= loss.nodes
    for node, what, logits, why in other_forms.left(graph, reported):
        calls.append(Call(where(node), f"{what} of {_shape(logits)}", False, why=why))
    return calls


def _replace(loss: Loss, heads: Heads, call: Call) -> Call | None:
    """Replace one loss, with its head or without, and return the record. None: one of ours without a head."""
    try:
        _refuse(loss)
    except LeftAlone as reason:
        return None if loss.is_own else dataclasses.replace(call, why=f"{reason}{loss.remedy}")
    try:
        path = head.find(loss, heads)
        if path is not None:
            return _put(path, call)
    except LeftAlone as reason:
        call = dataclasses.replace(call, head_left=str(reason))
    if loss.is_own:
        return dataclasses.replace(call, why="it is ours already") if call.head_left else None
    try:
        _refuse_few_classes(loss)
        return _put(tail.find(loss), call)
    except LeftAlone as reason:
        return dataclasses.replace(call, why=f"{reason}{loss.remedy}")


def _refuse(loss: Loss) -> None:
    """Raise LeftAlone for arguments that our operators do not take, or interpret differently than F.cross_entropy."""
    call_args = loss.call_args
    if modes(loss.node.graph)[loss.node].transformed:
        raise LeftAlone("it is inside a torch.func transform")
    if loss.why:
        raise LeftAlone(loss.why)
    for name, value in call_args.items():
        if name not in _KNOWN and value is not None:
            raise LeftAlone(f"our operator has no argument {name}")
    tensors = {name: call_args[name] for name in ("input", "target", "weight") if call_args.get(name) is not None}
    refuse_foreign(tensors)
    for name, tensor in tensors.items():
        dtype = value_of(tensor).dtype
        if dtype not in (checks.FLOATS if name != "target" else checks.FLOATS + checks.INDICES):
            raise LeftAlone(f"{name} has dtype {dtype}")
    soft = loss.is_soft
    if loss.is_nll and soft:
        raise LeftAlone("target has as many dimensions as input")
    if isinstance(call_args.get("label_smoothing"), fx.Node):
        raise LeftAlone("label_smoothing is computed in the graph")
    ignore_index = value_of(call_args.get("ignore_index", -100))
    if soft and not (isinstance(ignore_index, int) and ignore_index < 0):
        raise LeftAlone("ignore_index does not go with class probabilities")
    weight = value_of(call_args.get("weight"))
    if not soft and weight is not None and weight.requires_grad:
        raise LeftAlone("weight requires grad, which has no derivative; torch says so")


def _refuse_few_classes(loss: Loss) -> None:
    """Raise LeftAlone if compiled F.cross_entropy of class indices is faster than ours."""
    logits: Tensor = value_of(loss.call_args["input"])
    device = logits.device.type
    few = sizes.FEW_CLASSES.get(device)
    if few is None or loss.is_soft or isinstance(loss, by_hand.ByHand):
        return
    if sizes.statically_true(logits.shape[loss.class_dim] < few):
        on = "CPU" if device == "cpu" else "GPU"
        raise LeftAlone(f"F.cross_entropy is faster with fewer than {few} classes on a {on}")
    if device == "cpu" and sizes.statically_true(logits.stride(loss.class_dim) != 1):
        raise LeftAlone("F.cross_entropy is faster on a CPU where classes are not dense")


def _put(path: Path, call: Call) -> Call:
    """Replace the loss and what the path takes up by our operator, and return the record."""
    loss, emit, product = path.loss, Emitter(path.loss.node), path.product
    taken: dict[str, Any] = {"upcast_removed": path.upcast, "head": product is not None, "products": path.products}
    try:
        made = tail.emit_loss(emit, path) if product is None else head.emit_head(emit, path, product)
        result = _as_wanted(emit, loss.finished(emit, made))
        taken |= {**path.activation._asdict(), "logits_dtype": path.logits_dtype}
    except LeftAlone:
        emit.undo()
        raise
    except Exception as error:  # a view that the source does not allow, a scale that the operator refuses
        emit.undo()
        raise LeftAlone(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
    result.meta["example_value"] = value_of(loss.node)
    loss.node.replace_all_uses_with(result)
    for node in (loss.node, *path.nodes):
        if not node.users:  # its size may be asked for
            node.graph.erase_node(node)
    return dataclasses.replace(call, replaced=True, **taken)


def _as_wanted(emit: Emitter, loss: fx.Node) -> fx.Node:
    """Cast to the loss's dtype. F.cross_entropy returns the logits' dtype (float32 under autocast), ours float32."""
    expected = value_of(emit.loss)
    if value_of(loss).shape != expected.shape:
        raise LeftAlone(f"ours would have shape {tuple(value_of(loss).shape)}, not {tuple(expected.shape)}")
    return loss if value_of(loss).dtype == expected.dtype else emit("to", loss, expected.dtype)


def _shape(logits: Tensor) -> str:
    return f"{str(logits.dtype).removeprefix('torch.')} ({', '.join(map(str, logits.shape))})"


def _describe(loss: Loss) -> str:
    call_args = loss.call_args
    logits = value_of(call_args["input"])
    names = ("reduction", "label_smoothing")
    options = [f"{name}={call_args[name]!r}" for name in names if call_args.get(name) is not None]
    options += ["weight"] if call_args.get("weight") is not None else []
    what = _shape(logits) if isinstance(logits, Tensor) else type(logits).__name__
    return ", ".join([f"{loss.title} of {what}" if loss.title else what, *options])
