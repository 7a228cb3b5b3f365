"""Replaces a head and its loss, which find_head.py found, by our operator.

Links that change rows are applied to the hidden states instead. The operator has options for the other links.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...ops import checks
from ...ops.linear.composite import cast_for_autocast
from .emitter import Emitter
from .links import followed
from .nodes import LeftAlone, hint, name_of, refuse_foreign, value_of
from .path import Path
from .products import Product


def emit_head(emit: Emitter, path: Path, product: Product) -> fx.Node:
    """The node of our operator. Raises LeftAlone."""
    call_args = path.loss.arguments(emit)
    weight = emit("t", product.weight) if product.transposed else product.weight  # (V, H)
    input = _hidden(emit, product.input, path)
    tensors = (input, weight, call_args["target"], product.bias, call_args.get("weight"))
    refuse_foreign({str(one): one for one in tensors if one is not None})
    with emit.modes():
        (cast,) = cast_for_autocast(value_of(input))
    dtype = value_of(product.input if product.casts else product.node).dtype
    if cast.dtype != dtype:
        raise LeftAlone(f"torch computes it in {dtype} under autocast, ours would in {cast.dtype}")
    options: dict[str, Any] = path.activation.keywords()
    if "lse_square_scale" in call_args:
        options["lse_square_scale"] = call_args["lse_square_scale"]
    if path.logits_dtype is not None:
        options["logits_dtype"] = path.logits_dtype
    if path.products is not None:
        options["products"] = path.products
        try:
            checks.multiplied(path.products, cast, value_of(weight))
        except (TypeError, ValueError, RuntimeError) as reason:
            raise LeftAlone(str(reason)) from None
    return emit(
        torch.ops.xent.linear_cross_entropy.default,
        *tensors,
        ignore_index=call_args.get("ignore_index", -100),
        label_smoothing=call_args.get("label_smoothing", 0.0),
        reduction=call_args.get("reduction", "mean"),
        **options,
    )


def _hidden(emit: Emitter, hidden: fx.Node, path: Path) -> fx.Node:
    """Apply the views of the logits to the hidden states: the rows that the loss reads, (*target.shape, H)."""
    dim = value_of(hidden).dim() - 1
    features = emit.size(hidden, dim)
    for view in path.views:
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
    if dim != path.loss.class_dim:
        raise LeftAlone("the classes of the loss are not those of the product")
    return hidden if dim == value_of(hidden).dim() - 1 else emit("movedim", hidden, dim, -1)
