"""Finds the head before a loss: a product, then views, casts, a scale or a softcap, no other readers. Replaces both.

input (..., H) -> product (..., V) -> links -> loss      becomes      views of input -> linear_cross_entropy
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...ops import checks
from ...ops.linear.composite import cast_for_autocast
from . import products, region
from .emitter import Emitter
from .links import followed, link_of
from .losses import Loss
from .nodes import LeftAlone, hint, maker_of, name_of, refuse_foreign, value_of, viewed_by
from .path import Path, path_to
from .products import Product
from .reading import behind, input_of

# linear="auto" replaces a head with at least this many bytes of logits. Our operator's time against compiled F for
# head and loss (H200, bfloat16, `bench --linear 2048`): equal for 125 MiB of logits, on another day 7 % less; 7 to 12 %
# less for 250 MiB, with the same memory; 4 to 7 % less from 500 MiB on, with less memory if the logits exceed a chunk
# (head/sizes.py).
WORTHWHILE = {"cpu": 64 * 2**20}
WORTHWHILE_ON_GPUS = 250 * 2**20


@dataclass(frozen=True)
class Heads:
    """Which heads the pass replaces, and their 8-bit mode: the arguments of xent_ops.inductor.options."""

    linear: bool | str = "auto"
    products: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.linear, bool) or self.linear == "auto"):
            raise ValueError(f'linear must be "auto", True or False, got {self.linear!r}')
        checks.head_products(self.products)


def find(loss: Loss, heads: Heads) -> Path | None:
    """The path from the head to ``loss``; None if there is none. Raises LeftAlone if the operator cannot replace it."""
    if heads.linear is False:
        return None
    path = path_to(loss)
    product = products.of(path.source)
    if product is None:
        _refuse_other_products(path.source, loss)
        _refuse_from_outside(path.source)
        return None
    if heads.linear is not True:
        _refuse_not_worthwhile(loss, product)
    _refuse_twice_normalized(product)
    if loss.is_soft:
        raise LeftAlone("its target is class probabilities, for which all logits are made")
    path.product, path.products = products.before_casts(product), heads.products
    region.refuse(path)
    return path


def _refuse_other_products(source: fx.Node, loss: Loss) -> None:
    """Raise LeftAlone, for the report, if a head has another form, or a node that is no link follows it."""
    if name_of(source) in products.NAMES:
        raise LeftAlone(f"{source.name} is no product of hidden states (..., H) and a weight (V, H) or (H, V)")
    maker = maker_of(source)
    if isinstance(maker.target, torch._ops.HigherOrderOperator):
        raise LeftAlone(f"its logits are made inside of {maker.name}")
    for before in maker.all_input_nodes:
        while (link := link_of(before)) is not None:
            before = link.source
        product = products.of(before)
        classes = value_of(loss.call_args["input"]).shape[loss.class_dim]
        if product is not None and (maker is not source or hint(value_of(product.node).shape[-1]) == hint(classes)):
            raise LeftAlone(f"{maker.name} stands between the head and the loss")


def _refuse_from_outside(source: fx.Node) -> None:
    """Raise LeftAlone, for the report, if the logits were computed before this graph."""
    if source.op != "placeholder":  # is_leaf of x.split(n)[0] raises an error once x is written to
        return
    value = value_of(source)
    if not (isinstance(value, Tensor) and value.requires_grad and value.is_leaf):  # an operator's result
        raise LeftAlone("its logits come into the graph from outside: a graph break or an uncompiled head before it")


def _refuse_not_worthwhile(loss: Loss, product: Product) -> None:
    if _is_part(loss.node.graph):
        raise LeftAlone("its gradients would be kept in a checkpointed part; linear=True takes it")
    logits: Tensor = value_of(product.node)
    size = math.prod(map(hint, logits.shape)) * logits.element_size()
    least = WORTHWHILE.get(logits.device.type, WORTHWHILE_ON_GPUS)
    elements = math.prod(map(hint, value_of(product.weight).shape))
    if logits.dtype == torch.float16:  # the weight's gradient is added up in float32
        least += 4 * elements
    if _has_other_heads(product):  # each keeps a gradient of the weight until the backward
        least += logits.element_size() * elements
    if size < least:
        in_mib = f"logits of {size / 2**20:.3g} MiB, and {least / 2**20:.3g} MiB pay"
        raise LeftAlone(f"too small: {in_mib}; linear=True takes it")
    if loss.call_args.get("reduction", "mean") == "none" and value_of(loss.node).requires_grad:
        raise LeftAlone("losses of rows would take a fourth product for gradients; linear=True takes it")


def _refuse_twice_normalized(product: Product) -> None:
    """Raise LeftAlone if Inductor's code for a CPU computes a wrong gradient of the weight: pytorch issue 185702.

    The weight is F.normalize of F.normalize, and its gradient comes from any operator that Inductor does not fuse with
    them. Torch 2.13 is wrong, 2.14.1 is right.
    """
    if torch.__version__ >= "2.14":
        return
    node, value = behind(product.weight), value_of(product.weight)
    twice = name_of(node) == "normalize" == name_of(behind(input_of(node))) if isinstance(node, fx.Node) else False
    if twice and value.device.type == "cpu":
        raise LeftAlone("Inductor makes a wrong gradient of a weight that is normalised twice, on a CPU")


def _is_part(graph: fx.Graph) -> bool:
    """Is it a graph in a graph, a checkpointed part? Dynamo records the origin of inputs only for a whole graph."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return any("example_value" in node.meta for node in inputs) and not any("grapharg" in node.meta for node in inputs)


def _has_other_heads(product: Product) -> bool:
    """Does another product read the same weight, or its transpose, for example in a loss by chunks of rows?"""
    views = [view for view in product.weight.users if viewed_by(view) is product.weight]
    readers = {*product.weight.users}.union(*(view.users for view in views))
    return sum(products.of(node) is not None for node in readers) > 1


def emit_head(emit: Emitter, path: Path, product: Product) -> fx.Node:
    """Our operator in place of the loss and its head. Links that change rows are applied to the hidden states instead.

    The operator has options for the other links. Raises LeftAlone.
    """
    call_args = path.loss.arguments(emit)
    weight = emit("t", product.weight) if product.transposed else product.weight  # (V, H)
    input = _hidden(emit, product.input, path)
    bias = product.bias
    if bias is not None and value_of(bias).dim() > 1:
        bias = emit("flatten", bias)
    tensors = (input, weight, call_args["target"], bias, call_args.get("weight"))
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
