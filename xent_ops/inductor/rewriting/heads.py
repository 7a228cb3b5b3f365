"""The head and the loss as one operator of ours: F.linear_cross_entropy of torch 2.13, and what find_head.py finds.

With options= F.linear_cross_entropy is an operator of torch_nn in a Dynamo graph, which makes its gradients in the
forward too. Of its options ours has accumulate_dtype; the rows of a chunk are ours to choose. Without options= it is
F.linear and F.cross_entropy, which the stack traces tell from other products before a loss.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from ...ops import checks
from ...ops.linear.composite import cast_for_autocast
from . import writers
from .emitter import Emitter
from .links import LeftAlone
from .nodes import value_of

_CHUNKED = "torch_nn::_linear_cross_entropy_batch_chunked"  # value and gradients
_CHUNKED_ROWS = "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"
_PLAIN = ("torch/nn/functional.py", " in linear_cross_entropy\n")  # in the innermost frame of a stack trace


@dataclass
class FoundHead:
    input: fx.Node
    linear_weight: fx.Node
    linear_bias: fx.Node | None
    dtype: torch.dtype  # of the logits
    options: dict[str, Any]  # of our operator, beside those that F.cross_entropy has
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


def of_chunked(node: fx.Node, given: dict[str, Any]) -> FoundHead:
    input, dtype = given["input"], None if given["acc_policy"] == "compact" else given["acc_dtype"]
    nodes: list[Any] = [] if given["reduction"] == "none" else [node.args[0]]
    # torch's operator ignores autocast: its logits have the input's dtype.
    own = {"accumulate_dtype": dtype}
    return FoundHead(input, given["linear_weight"], given["linear_bias"], value_of(input).dtype, own, nodes)


def _schema_name(node: Any) -> str:
    target = node.target if isinstance(node, fx.Node) else None
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def is_asked_for(node: fx.Node) -> bool:
    """Was this node made by F.linear_cross_entropy?"""
    frame = (node.stack_trace or "").replace("\\", "/").rpartition('File "')[2]
    return all(part in frame for part in _PLAIN)


def emit(emit: Emitter, head: FoundHead, given: dict[str, Any], products: str | None = None) -> fx.Node:
    """The node of our operator. Raises LeftAlone."""
    tensors = (head.input, head.linear_weight, given["target"], head.linear_bias, given.get("weight"))
    for tensor in tensors:
        if tensor is not None and not isinstance(value_of(tensor), FakeTensor):
            raise LeftAlone(f"{tensor} is a {type(value_of(tensor)).__name__}, not a plain tensor")
    value = value_of(head.input)
    key = torch._C._dispatch_key_for_device(value.device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("xent::linear_cross_entropy_forward", key):
        raise LeftAlone(f"xent_ops has no kernel for the device {value.device.type}")
    with emit.modes():
        (cast,) = cast_for_autocast(value)
    if cast.dtype != head.dtype:
        raise LeftAlone(f"torch computes it in {_name(head.dtype)} under autocast, ours would in {_name(cast.dtype)}")
    options = dict(head.options)
    if products is not None:
        options["products"] = _possible(products, cast, value_of(head.linear_weight))
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
        **options,
    )


def _possible(products: str, input: Tensor, linear_weight: Tensor) -> str:
    try:
        checks.multiplied(products, input, linear_weight)
    except (TypeError, ValueError, RuntimeError) as reason:
        raise LeftAlone(str(reason)) from None
    return products


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
