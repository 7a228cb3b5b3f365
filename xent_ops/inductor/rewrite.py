"""Replaces cross entropy in a Dynamo graph by ``torch.ops.xent`` operators and views.

The new nodes are operators and methods of torch, not our functions, because torch caches graphs of those only.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from ..ops import checks
from . import heads, writers
from .emitter import Emitter
from .links import LeftAlone
from .losses import LOG_PROBS, Loss, lookalikes, losses
from .nodes import value_of
from .report import Call
from .tail import Tail

_KNOWN = {"input", "target", "weight", "ignore_index", "reduction", "label_smoothing"}
_INSIDE = ("torch/nn/modules/loss.py", "torch/nn/functional.py")
_LEGACY = ("size_average", "reduce")


def replace_cross_entropy(graph: fx.Graph) -> list[Call]:
    """Replace what can be replaced, in place, and return a record of each call."""
    written_out = [Call(_where(node), what, False, why=LOG_PROBS) for node, what in lookalikes(graph)]
    calls = []
    for loss in losses(graph):
        if isinstance(loss, fx.Node):
            calls.append(Call(_where(loss), "a loss of torch.nn", False, why="Dynamo did not inline this module"))
            continue
        where, what = _where(loss.node), _describe(loss)
        try:
            if loss.transformed:
                raise LeftAlone("it is inside a torch.func transform")
            if _replace_with_head(loss):
                calls.append(Call(where, what, True, head=True))
                continue
            _refuse(loss)
            tail = _replace(loss)
            calls.append(Call(where, what, True, tail.upcast, tail.softcap, tail.logit_scale))
        except LeftAlone as reason:
            calls.append(Call(where, what, False, why=str(reason)))
    return calls + written_out


def _refuse(loss: Loss) -> None:
    """Raise LeftAlone for arguments that our operators do not take, or interpret differently than F.cross_entropy."""
    given = loss.given
    for name in _LEGACY:
        if given.get(name) is not None:
            raise LeftAlone(f"the deprecated argument {name} is given; use reduction")
    for name in given:
        if name not in _KNOWN and name not in _LEGACY:
            raise LeftAlone(f"the argument {name} is unknown to xent_ops")
    for name in ("input", "target", "weight"):
        tensor = value_of(given.get(name))
        if name == "weight" and tensor is None:
            continue
        if not isinstance(tensor, FakeTensor):
            raise LeftAlone(f"{name} is a {type(tensor).__name__}, not a plain tensor")
        valid = checks.FLOATS if name != "target" else checks.FLOATS + checks.INDICES
        if tensor.dtype not in valid:
            raise LeftAlone(f"{name} has dtype {tensor.dtype}")
    logits, target = value_of(given["input"]), value_of(given["target"])
    soft = _is_soft(logits, target)
    if loss.is_nll and soft:
        raise LeftAlone("target has as many dimensions as input")
    if isinstance(given.get("label_smoothing"), fx.Node):
        raise LeftAlone("label_smoothing is computed in the graph")
    ignore_index = value_of(given.get("ignore_index", -100))
    if soft and not (isinstance(ignore_index, int) and ignore_index < 0):
        raise LeftAlone("ignore_index does not go with class probabilities")
    weight = value_of(given.get("weight"))
    if not soft and weight is not None and weight.requires_grad:
        raise LeftAlone("weight requires grad, which has no derivative; torch says so")
    operation = "xent::soft_cross_entropy_forward" if soft else "xent::cross_entropy_forward"
    key = torch._C._dispatch_key_for_device(logits.device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operation, key):
        raise LeftAlone(f"xent_ops has no kernel for the device {logits.device.type}")


def _replace_with_head(loss: Loss) -> bool:
    """Replace F.linear_cross_entropy. Raises LeftAlone only where torch has an operator of its own for it."""
    head = heads.of(loss.node, loss.given)
    if head is None:
        return False
    try:
        _put(loss, head.nodes, lambda emit: heads.emit(emit, head, loss.given))
    except LeftAlone:
        if loss.is_chunked:
            raise
        return False
    return True


def _is_soft(logits: Tensor, target: Tensor) -> bool:
    return target.dim() == logits.dim()


def _replace(loss: Loss) -> Tail:
    """Replace one loss and return the nodes that it took up. Raises LeftAlone, and then nothing has changed."""
    tail = loss.tail()
    _put(loss, tail.nodes, lambda emit: _emit_loss(emit, _with_views(emit, tail), loss, tail))
    return tail


def _put(loss: Loss, dead: list[fx.Node], make: Callable[[Emitter], fx.Node]) -> None:
    """What ``make`` emits in the place of the loss, without the nodes before it that it took up."""
    emit = Emitter(loss.node)
    try:
        result = _as_wanted(emit, make(emit))
    except Exception as error:  # a view that the source does not allow, a scale that the operator refuses
        emit.undo()
        raise LeftAlone(_first_line(error)) from error
    _substitute(loss.node, result)
    for node in dead:
        if not node.users:  # its size may be asked for
            node.graph.erase_node(node)


def _as_wanted(emit: Emitter, loss: fx.Node) -> fx.Node:
    """F.cross_entropy returns the logits' dtype, under autocast float32. Our operators return float32."""
    wanted = value_of(emit.loss)
    if value_of(loss).shape != wanted.shape:
        raise LeftAlone(f"ours would have shape {tuple(value_of(loss).shape)}, not {tuple(wanted.shape)}")
    return loss if value_of(loss).dtype == wanted.dtype else emit("to", loss, wanted.dtype)


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
            # The upcast of a slice is dense, the slice is not. Where it cannot be viewed, reshape copies it.
            target = "reshape"
        node = emit(target, node, *view.args[1:], **view.kwargs)
    return node


def _classes_last(emit: Emitter, tensor: fx.Node) -> fx.Node:
    if value_of(tensor).dim() <= 2:
        return tensor
    tensor = emit("movedim", tensor, 1, -1)
    # Dense already where the model made its (N, C, d1) by transposing.
    return tensor if value_of(tensor).stride(-1) == 1 else emit("contiguous", tensor)


def _emit_loss(emit: Emitter, logits: fx.Node, call: Loss, tail: Tail) -> fx.Node:
    given = call.given
    weight, reduction = given.get("weight"), given.get("reduction", "mean")
    smoothing = given.get("label_smoothing", 0.0)
    options: dict[str, Any] = {} if tail.softcap is None else {"softcap": tail.softcap}
    if tail.logit_scale != 1.0:
        options["logit_scale"] = tail.logit_scale
    logits = _classes_last(emit, logits)
    soft = _is_soft(value_of(logits), value_of(given["target"]))
    target = _classes_last(emit, given["target"]) if soft else given["target"]
    # F.cross_entropy saves class indices and weights too, so torch itself refuses a write to them. Of class
    # probabilities it may save a copy.
    saved = [value_of(tensor) for tensor in (logits, *((target,) if soft else ()))]
    writer = writers.after(emit.loss, saved) if value_of(emit.loss).requires_grad else None
    if writer is not None:
        what = "the logits or the target" if soft else "the logits"
        raise LeftAlone(f"{writer.name} may write to {what} after the loss, whose backward needs them")
    if not soft:
        loss = emit(
            torch.ops.xent.cross_entropy.default,
            logits,
            target,
            weight,
            ignore_index=given.get("ignore_index", -100),
            label_smoothing=smoothing,
            reduction=reduction,
            **options,
        )
    else:
        soft_forward = torch.ops.xent.soft_cross_entropy_forward.default
        rows = emit(soft_forward, logits, target, weight, label_smoothing=smoothing, **options)
        loss = emit(operator.getitem, rows, 0)
        if reduction != "none":
            loss = emit(reduction, loss)  # the methods sum and mean
    return loss


def _first_line(error: Exception) -> str:
    if isinstance(error, LeftAlone):
        return str(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _describe(loss: Loss) -> str:
    given = loss.given
    logits = value_of(given["input"])
    given_options = {name: given.get(name) for name in (*_LEGACY, "reduction", "label_smoothing")}
    options = [f"{name}={option!r}" for name, option in given_options.items() if option is not None]
    if given.get("weight") is not None:
        options.append("weight")
    what = type(logits).__name__
    if isinstance(logits, Tensor):
        what = f"{str(logits.dtype).removeprefix('torch.')} ({', '.join(map(str, logits.shape))})"
    if loss.is_nll or loss.is_chunked:
        what = f"{'nll_loss' if loss.is_nll else 'linear_cross_entropy'} of {what}"
    return ", ".join([what, *options])


def _where(node: fx.Node) -> str:
    """The innermost frame outside torch's losses: nn.CrossEntropyLoss is called from somewhere."""
    frames = re.findall(r'File "(.+)", line (\d+), in (\S+)', (node.stack_trace or "").replace("\\", "/"))
    outside = [frame for frame in frames if not frame[0].endswith(_INSIDE)]
    if not outside:
        return "unknown place"
    file, line, function = outside[-1]
    return f"{file}:{line} in {function}"
