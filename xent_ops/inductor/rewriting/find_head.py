"""Finds the head before a loss: a product, then views, casts, a scale or a softcap, without other readers.

input (..., H) -> product (..., V) -> links -> loss      becomes      views of input -> linear_cross_entropy
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ...kernels.options import Activation
from . import products
from .links import Link, activation_of, link_of, walk, with_own
from .losses import Loss, Start
from .nodes import LeftAlone, hint, maker_of, name_of, value_of, viewed_by
from .products import Product
from .reading import behind, input_of
from .region import Region

# linear="auto" replaces a head with at least this many bytes of logits. Our operator's time against compiled F for
# head and loss (H200, bfloat16, `bench --linear 2048`): equal for 125 MiB of logits; 7 and 12 % less for 250 MiB, with
# the same memory; 4 to 7 % less from 500 MiB on, with less memory if the logits exceed a chunk (head/sizes.py).
WORTHWHILE = {"cpu": 64 * 2**20}
WORTHWHILE_ON_GPUS = 250 * 2**20


@dataclass
class Found:
    """A head that the operator can replace, with all nodes from it to the loss."""

    product: Product
    links: list[Link]  # from the loss back to the product
    start: Start
    activation: Activation

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that are dead once the operator replaces them, the last one first."""
        return [*reversed(self.start.behind), *(link.node for link in self.links), *self.product.nodes]

    @property
    def upcast(self) -> bool:
        return self.start.upcast or any(link.kind == "upcast" for link in self.links)

    @property
    def logits_dtype(self) -> torch.dtype | None:
        """The logits' dtype; None for the dtype of the operands."""
        return value_of(self.product.node).dtype if self.product.casts else None

    @property
    def views(self) -> list[fx.Node]:
        """The views from the product to the loss, in order."""
        return [link.node for link in reversed(self.links) if link.kind == "view"] + self.start.views


def find(loss: Loss, linear: bool | str) -> Found | None:
    """The head before ``loss``; None if there is none. Raises LeftAlone if the operator cannot replace it."""
    start = loss.start()
    links, source = walk(start.logits, start.readers)
    product = products.of(source)
    if product is None:
        _refuse_other_products(source, loss)
        _refuse_from_outside(source)
        return None
    _refuse_not_worthwhile(loss, product, linear)
    _refuse_twice_normalized(product)
    product = products.before_casts(product)
    found = Found(product, links, start, with_own(activation_of(links), loss.call_args))
    if loss.is_soft:
        raise LeftAlone("its target is class probabilities, for which all logits are made")
    reads = {"input of the head": product.input, "weight of the head": product.weight, "bias": product.bias}
    Region(loss.node, found.nodes, [*reads.items(), *loss.reads], product.past).refuse()
    return found


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
        if product is not None and (maker is not source or hint(value_of(product.node).shape[-1]) == _classes(loss)):
            raise LeftAlone(f"{maker.name} stands between the head and the loss")


def _refuse_from_outside(source: fx.Node) -> None:
    """Raise LeftAlone, for the report, if the logits were computed before this graph."""
    value = value_of(source)
    leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf  # no operator's result
    if source.op == "placeholder" and not leaf:
        raise LeftAlone("its logits come into the graph from outside: a graph break or an uncompiled head before it")


def _classes(loss: Loss) -> int:
    shape = value_of(loss.call_args["input"]).shape
    return hint(shape[loss.class_dim])


def _refuse_not_worthwhile(loss: Loss, product: Product, linear: bool | str) -> None:
    if linear is True:
        return
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
        raise LeftAlone(f"too small: logits of {_mib(size)} MiB, and {_mib(least)} MiB pay; linear=True takes it")
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
    readers = list(product.weight.users)
    for view in product.weight.users:
        if viewed_by(view) is product.weight:
            readers += view.users
    return sum(products.of(node) is not None for node in readers) > 1


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g}"
