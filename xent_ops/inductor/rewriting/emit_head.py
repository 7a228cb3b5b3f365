"""Replaces a head and its loss, which find_head.py found, by our operator.

Links that change rows are applied to the hidden states instead. The operator has options for the other links.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ...ops import checks
from ...ops.linear.composite import cast_for_autocast
from .emitter import Emitter
from .find_head import Found
from .links import followed
from .losses import Loss
from .nodes import LeftAlone, hint, name_of, refuse_foreign, value_of
from .products import Product
from .region import refuse_written_after


def emit_head(emit: Emitter, found: Found, loss: Loss, products: str | None) -> fx.Node:
    """The node of our operator. Raises LeftAlone."""
    product, call_args = found.product, loss.arguments(emit)
    weight = _matrix(emit, product)
    input = _hidden(emit, product.input, found, loss)
    tensors = (input, weight, call_args["target"], product.bias, call_args.get("weight"))
    refuse_foreign({str(one): one for one in tensors if one is not None})
    with emit.modes():
        (cast,) = cast_for_autocast(value_of(input))
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
    saved += [("bias", product.bias)] if product.bias is not None else []
    saved += [("target", call_args["target"])] if loss.saves_target else []
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
    return emit("t", product.weight) if product.transposed else product.weight


def _hidden(emit: Emitter, hidden: fx.Node, found: Found, loss: Loss) -> fx.Node:
    """Apply the views of the logits to the hidden states: the rows that the loss reads, (*target.shape, H)."""
    dim = value_of(hidden).dim() - 1
    features = value_of(hidden).shape[dim]
    if not isinstance(features, int):
        features = emit("size", hidden, dim)
    for view in found.views:
        if name_of(view) == "contiguous":
            continue
        dim = followed(view, dim)
        expected = [hint(size) for size in value_of(view).shape]
        expected[dim] = hint(value_of(features))
        target, args = view.target, list(view.args[1:])
        if name_of(view) in ("view", "reshape"):
            target = "reshape"  # the strides of hidden states may differ from those of logits
            shape = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
            shape[dim] = features
            args = [tuple(shape)]
        hidden = emit(target, hidden, *args, **view.kwargs)
        if [hint(size) for size in value_of(hidden).shape] != expected:
            raise LeftAlone(f"{view.name} selects classes")
    if dim != loss.class_dim:
        raise LeftAlone("the classes of the loss are not those of the product")
    return hidden if dim == value_of(hidden).dim() - 1 else emit("movedim", hidden, dim, -1)


def _possible(products: str, input: Tensor, linear_weight: Tensor) -> str:
    try:
        checks.multiplied(products, input, linear_weight)
    except (TypeError, ValueError, RuntimeError) as reason:
        raise LeftAlone(str(reason)) from None
    return products


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
