"""F.linear_cross_entropy of torch 2.13 in a Dynamo graph: the head and the loss become one operator of ours.

With options= it is an operator of torch_nn, without them F.linear and F.cross_entropy, which the stack traces tell from
other products before a loss. That operator of torch makes its gradients in the forward too. Of its options ours has
accumulate_dtype; the rows of a chunk are ours to choose.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from . import writers
from .emitter import Emitter
from .links import LeftAlone
from .modes import modes
from .nodes import name_of, value_of

_CHUNKED = "torch_nn::_linear_cross_entropy_batch_chunked"  # value and gradients
_CHUNKED_ROWS = "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"
_PLAIN = ("torch/nn/functional.py", " in linear_cross_entropy\n")  # in the innermost frame of a stack trace


@dataclass
class Head:
    input: fx.Node
    linear_weight: fx.Node
    linear_bias: fx.Node | None
    accumulate_dtype: torch.dtype | None
    nodes: list[fx.Node]  # those that are dead once ours stands there, the last one first


def chunked(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a loss that torch makes by chunks. ``node``: its value, not the operator with the gradients."""
    call: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    name = _schema_name(call)
    if name != (_CHUNKED_ROWS if call is node else _CHUNKED) or (call is not node and len(call.users) > 1):
        return None
    names = [argument.name for argument in call.target._schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    return given if call is not node else {**given, "reduction": "none"}


def _schema_name(node: Any) -> str:
    target = node.target if isinstance(node, fx.Node) else None
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def of(node: fx.Node, given: dict[str, Any]) -> Head | None:
    """The head before a loss, where both come from F.linear_cross_entropy and the target is of class indices."""
    if (arguments := chunked(node)) is not None:
        dtype = None if arguments["acc_policy"] == "compact" else arguments["acc_dtype"]
        call: list[Any] = [] if arguments["reduction"] == "none" else [node.args[0]]
        return Head(arguments["input"], arguments["linear_weight"], arguments["linear_bias"], dtype, call)
    logits: Any = given["input"]
    linear: Any = logits.args[0] if name_of(logits) == "reshape" else logits
    if linear.target is not F.linear or not all(map(_is_plain, (node, logits, linear))):
        return None
    shape = value_of(linear).shape
    # The classes of a K-dimensional loss stand among the others; of probabilities there is no operator by chunks.
    if value_of(logits).shape != shape or value_of(given["target"]).shape != shape[:-1]:
        return None
    nodes = list(dict.fromkeys((logits, linear)))
    if any(len(one.users) > 1 for one in nodes):
        return None
    input, weight, bias = (*linear.args, None)[:3]
    return Head(input, weight, bias, None, nodes)


def _is_plain(node: fx.Node) -> bool:
    frame = (node.stack_trace or "").replace("\\", "/").rpartition('File "')[2]
    return all(part in frame for part in _PLAIN)


def emit(emit: Emitter, head: Head, given: dict[str, Any]) -> fx.Node:
    """The node of our operator. Raises LeftAlone."""
    tensors = (head.input, head.linear_weight, given["target"], head.linear_bias, given.get("weight"))
    for tensor in tensors:
        if tensor is not None and not isinstance(value_of(tensor), FakeTensor):
            raise LeftAlone(f"{tensor} is a {type(value_of(tensor)).__name__}, not a plain tensor")
    value = value_of(head.input)
    key = torch._C._dispatch_key_for_device(value.device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("xent::linear_cross_entropy_forward", key):
        raise LeftAlone(f"xent_ops has no kernel for the device {value.device.type}")
    if chunked(emit.loss) is not None and value.dtype == torch.float32 and _autocast(emit.loss, value.device.type):
        raise LeftAlone("torch computes it in float32 under autocast, ours would not")
    if value_of(emit.loss).requires_grad:
        saved = [value_of(head.input), value_of(head.linear_weight)]
        if (writer := writers.after(emit.loss, saved)) is not None:
            raise LeftAlone(f"{writer.name} may write to the head or its input after the loss")
    return emit(
        torch.ops.xent.linear_cross_entropy.default,
        *tensors,
        ignore_index=given.get("ignore_index", -100),
        label_smoothing=given.get("label_smoothing", 0.0),
        reduction=given.get("reduction", "mean"),
        accumulate_dtype=head.accumulate_dtype,
    )


def _autocast(node: fx.Node, device: str) -> bool:
    for context in reversed(modes(node.graph)[node]):
        if context.target is torch.amp.autocast_mode._enter_autocast and context.args[0] == device:
            return bool(context.args[2])
    return torch.is_autocast_enabled(device)
