"""Replaces a head and its loss, which find_head.py found, by our operator.

Links that change rows are applied to the hidden states instead. The operator has options for the other links.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from ...ops import checks
from ...ops.linear.composite import cast_for_autocast
from .emitter import Emitter
from .find_head import Found
from .links import BY_TENSOR
from .losses import Loss
from .nodes import LeftAlone, hint, name_of, parts_of, value_of
from .products import Product
from .region import refuse_written_after


def emit_head(emit: Emitter, found: Found, loss: Loss, products: str | None) -> fx.Node:
    """The node of our operator. Raises LeftAlone."""
    product, call_args = found.product, loss.arguments(emit)
    weight = _matrix(emit, product)
    input, bias = _scaled(emit, found, product.input), _scaled(emit, found, product.bias)
    input = _hidden(emit, input, found, loss)
    tensors = (input, weight, call_args["target"], bias, call_args.get("weight"))
    for tensor in tensors:
        if tensor is not None and not isinstance(value_of(tensor), FakeTensor):
            raise LeftAlone(f"{tensor} is a {type(value_of(tensor)).__name__}, not a plain tensor")
    value = value_of(input)
    key = torch._C._dispatch_key_for_device(value.device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("xent::linear_cross_entropy_forward", key):
        raise LeftAlone(f"xent_ops has no kernel for the device {value.device.type}")
    with emit.modes():
        (cast,) = cast_for_autocast(value)
    dtype = value_of(product.input if product.casts else product.node).dtype
    if cast.dtype != dtype:
        raise LeftAlone(f"torch computes it in {_name(dtype)} under autocast, ours would in {_name(cast.dtype)}")
    options: dict[str, Any] = found.activation.keywords()
    options |= {name: call_args[name] for name in ("lse_square_scale",) if name in call_args}
    if found.logits_dtype is not None:
        options["logits_dtype"] = found.logits_dtype
    if products is not None:
        options["products"] = _possible(products, cast, value_of(weight))
    saved = [("input of the head", product.input), ("weight of the head", product.weight)]
    saved += [("target", call_args["target"])] if loss.saves_target else []
    saved += [("bias", product.bias)] if product.bias is not None and bias is not product.bias else []
    refuse_written_after(emit.loss, saved)
    return emit(
        torch.ops.xent.linear_cross_entropy.default,
        *tensors,
        ignore_index=call_args.get("ignore_index", -100),
        label_smoothing=call_args.get("label_smoothing", 0.0),
        reduction=call_args.get("reduction", "mean"),
        **options,
    )


def _matrix(emit: Emitter, product: Product) -> fx.Node:
    """The weight as (V, H)."""
    if value_of(product.weight).dim() > 2:  # a convolution's weight, (V, H, 1, ...)
        return emit("flatten", product.weight, 1)
    return emit("t", product.weight) if product.transposed else product.weight


def _scaled(emit: Emitter, found: Found, operand: Any) -> Any:
    """The input or the bias, scaled by the tensors that scale the logits."""
    for link in reversed(found.links):
        if operand is not None and link.tensor is not None:
            operand = emit("mul" if link.kind == BY_TENSOR["mul"] else "div", operand, link.tensor)
    return operand


def _hidden(emit: Emitter, hidden: fx.Node, found: Found, loss: Loss) -> fx.Node:
    """Apply the views of the logits to the hidden states: the rows that the loss reads, (*target.shape, H)."""
    dim = found.product.dim
    features = value_of(hidden).shape[dim]
    if not isinstance(features, int):
        features = emit("size", hidden, dim)
    for view in found.views:
        if name_of(view) == "contiguous" or isinstance(value_of(view), (tuple, list)):  # several results: see below
            continue
        dim = _followed(view, dim)
        expected = [hint(size) for size in value_of(view).shape]
        expected[dim] = hint(value_of(features))
        target, args = view.target, list(view.args[1:])
        if name_of(view) in ("view", "reshape"):
            target = "reshape"  # the strides of hidden states may differ from those of logits
            shape = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
            shape[dim] = features
            args = [tuple(shape)]
        if (parts := parts_of(view)) is not None:
            hidden = emit(parts.target, hidden, *parts.args[1:], **parts.kwargs)
        hidden = emit(target, hidden, *args, **view.kwargs)
        if [hint(size) for size in value_of(hidden).shape] != expected:
            raise LeftAlone(f"{view.name} selects classes")
    if dim != loss.class_dim:
        raise LeftAlone("the classes of the loss are not those of the product")
    return hidden if dim == value_of(hidden).dim() - 1 else emit("movedim", hidden, dim, -1)


def _followed(view: fx.Node, dim: int) -> int:
    """The dimension of the classes after a view of the logits. It uses hints, so symbolic sizes get no guard."""
    parts = parts_of(view)
    calls = [view] if parts is None else [parts, view]
    before: Tensor = value_of(calls[0].args[0])
    sizes, classes = [hint(size) for size in before.shape], hint(before.shape[dim])
    # A probe with stride 1 in this dimension and 0 in the others.
    strides = [0] * len(sizes)
    strides[dim] = 1
    result: Any = torch.empty_strided(sizes, strides, device="meta")
    for call in calls:
        args, kwargs = fx.node.map_arg((call.args[1:], call.kwargs), lambda node: hint(value_of(node)))
        target: Any = "reshape" if call.target == "view" else call.target
        result = (
            getattr(result, target)(*args, **kwargs) if isinstance(target, str) else target(result, *args, **kwargs)
        )
    found = [index for index, stride in enumerate(result.stride()) if stride != 0 and result.shape[index] != 1]
    if len(found) != 1:
        raise LeftAlone(f"{calls[0].name} does not keep the classes in one dimension")
    if result.shape[found[0]] != classes:
        raise LeftAlone(f"{calls[0].name} selects classes")
    return found[0]


def _possible(products: str, input: Tensor, linear_weight: Tensor) -> str:
    try:
        checks.multiplied(products, input, linear_weight)
    except (TypeError, ValueError, RuntimeError) as reason:
        raise LeftAlone(str(reason)) from None
    return products


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
