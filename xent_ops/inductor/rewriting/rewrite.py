"""Replaces cross entropy in a Dynamo graph by ``torch.ops.xent`` operators and views.

The new nodes are operators and methods of torch, not our functions, because torch caches graphs of those only.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from ...kernels import sizes
from ...kernels.options import Activation
from ...ops import checks
from . import find_by_hand, find_head, other_forms
from .by_hand import ByHand
from .emit_head import emit_head
from .emitter import Emitter
from .losses import Loss, losses
from .nodes import LeftAlone, refuse_foreign, value_of, where
from .region import refuse_written_after
from .report import Call
from .tail import Tail

_KNOWN = {"input", "target", "weight", "ignore_index", "reduction", "label_smoothing"}
_OWN = {*Activation._fields, "lse_square_scale"}


def replace_cross_entropy(graph: fx.Graph, linear: bool | str, products: str | None = None) -> list[Call]:
    """Replace losses in the graph, in place, and return a record of each call. ``linear``: heads as well?

    ``products``: the 8-bit mode of heads.
    """
    calls = []
    reported: set[fx.Node] = set()
    for loss in itertools.chain(losses(graph), find_by_hand.losses(graph)):
        call = _replace(loss, linear, products, Call(where(loss.node), _describe(loss), False))
        if call is not None:
            calls.append(call)
            reported |= loss.nodes
    for node, what, logits, why in other_forms.left(graph, reported):
        calls.append(Call(where(node), f"{what} of {_shape(logits)}", False, why=why))
    return calls


def _replace(loss: Loss, linear: bool | str, products: str | None, call: Call) -> Call | None:
    """Replace one loss, with its head or without, and return the record. None: one of ours without a head."""
    try:
        if loss.transformed:
            raise LeftAlone("it is inside a torch.func transform")
        _refuse(loss)
    except LeftAlone as reason:
        return None if loss.is_own else dataclasses.replace(call, why=f"{reason}{loss.remedy}")
    try:
        found = find_head.find(loss, linear) if linear is not False else None
        if found is not None:
            _put(loss, found.nodes, lambda emit: emit_head(emit, found, loss, products))
            taken = found.activation._asdict() | {"logits_dtype": found.logits_dtype, "products": products}
            return Call(call.where, call.what, True, found.upcast, **taken, head=True)
    except LeftAlone as reason:
        call = dataclasses.replace(call, head_left=str(reason))
    if loss.is_own:
        return dataclasses.replace(call, why="it is ours already") if call.head_left else None
    try:
        _refuse_few_classes(loss)
        tail = loss.tail()
        _put(loss, tail.nodes, lambda emit: _emit_loss(emit, _with_views(emit, tail), loss, tail))
    except LeftAlone as reason:
        return dataclasses.replace(call, why=f"{reason}{loss.remedy}")
    taken = tail.activation._asdict()
    return Call(call.where, call.what, True, tail.upcast, **taken, head_left=call.head_left)


def _refuse(loss: Loss) -> None:
    """Raise LeftAlone for arguments that our operators do not take, or interpret differently than F.cross_entropy."""
    call_args = loss.call_args
    if loss.why:
        raise LeftAlone(loss.why)
    for name, value in call_args.items():
        if name not in _KNOWN | _OWN and value is not None:
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
    if few is None or loss.is_soft or isinstance(loss, ByHand):
        return
    if sizes.statically_true(logits.shape[loss.class_dim] < few):
        on = "CPU" if device == "cpu" else "GPU"
        raise LeftAlone(f"F.cross_entropy is faster with fewer than {few} classes on a {on}")
    if device == "cpu" and sizes.statically_true(logits.stride(loss.class_dim) != 1):
        raise LeftAlone("F.cross_entropy is faster on a CPU where classes are not dense")


def _put(loss: Loss, dead: list[fx.Node], make: Callable[[Emitter], fx.Node]) -> None:
    """Replace the loss by the result of ``make``. Removes ``dead``, the nodes before the loss that it also replaces."""
    emit = Emitter(loss.node)
    try:
        result = _as_wanted(emit, loss.finished(emit, make(emit)))
    except Exception as error:  # a view that the source does not allow, a scale that the operator refuses
        emit.undo()
        raise LeftAlone(_first_line(error)) from error
    _substitute(loss.node, result)
    for node in dead:
        if not node.users:  # its size may be asked for
            node.graph.erase_node(node)


def _as_wanted(emit: Emitter, loss: fx.Node) -> fx.Node:
    """Cast to the loss's dtype. F.cross_entropy returns the logits' dtype (float32 under autocast), ours float32."""
    expected = value_of(emit.loss)
    if value_of(loss).shape != expected.shape:
        raise LeftAlone(f"ours would have shape {tuple(value_of(loss).shape)}, not {tuple(expected.shape)}")
    return loss if value_of(loss).dtype == expected.dtype else emit("to", loss, expected.dtype)


def _substitute(loss: fx.Node, result: fx.Node) -> None:
    result.meta["example_value"] = value_of(loss)
    loss.replace_all_uses_with(result)
    loss.graph.erase_node(loss)


def _with_views(emit: Emitter, tail: Tail) -> fx.Node:
    """The views of the tail, applied to the logits before it."""
    node = tail.source
    for view in tail.views:
        target = view.target
        if target == "view":
            # The upcast of a slice is dense, the slice is not. If it cannot be viewed, reshape copies it.
            target = "reshape"
        node = emit(target, node, *view.args[1:], **view.kwargs)
    return node


def _classes_last(emit: Emitter, tensor: fx.Node, dim: int) -> fx.Node:
    if dim == value_of(tensor).dim() - 1:
        return tensor
    tensor = emit("movedim", tensor, dim, -1)
    # It is dense already if the model transposed to get its (N, C, d1).
    return tensor if value_of(tensor).stride(-1) == 1 else emit("contiguous", tensor)


def _emit_loss(emit: Emitter, logits: fx.Node, call: Loss, tail: Tail) -> fx.Node:
    call_args = call.arguments(emit)
    weight, reduction = call_args.get("weight"), call_args.get("reduction", "mean")
    smoothing = call_args.get("label_smoothing", 0.0)
    options = tail.activation.keywords()
    logits, soft = _classes_last(emit, logits, call.class_dim), call.is_soft
    target = _classes_last(emit, call_args["target"], call.class_dim) if soft else call_args["target"]
    saved = [("logits", logits), *([("target", target)] if call.saves_target else [])]
    refuse_written_after(call.node, saved)
    if not soft:
        loss = emit(
            torch.ops.xent.cross_entropy.default,
            logits,
            target,
            weight,
            ignore_index=call_args.get("ignore_index", -100),
            label_smoothing=smoothing,
            reduction=reduction,
            **options,
        )
    else:
        soft_forward = torch.ops.xent.soft_cross_entropy_forward.default
        # torch accepts any numbers as probabilities, and written-out sums have other uses, such as policy gradients.
        rows = emit(soft_forward, logits, target, weight, False, label_smoothing=smoothing, **options)
        loss = emit(operator.getitem, rows, 0)
        if reduction != "none":
            loss = emit(reduction, loss)  # the methods sum and mean
    return loss


def _first_line(error: Exception) -> str:
    if isinstance(error, LeftAlone):
        return str(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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
