"""Finds the head before a loss: a product, then views, casts, a scale or a softcap, and nobody else who reads them.

    input (..., H) -> product (..., V) -> links -> loss      becomes      views of input -> linear_cross_entropy

What the links do to rows is done to the hidden states instead. The operator has options for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...kernels.options import Activation
from . import products, writers
from .emitter import Emitter
from .heads import FoundHead, is_asked_for
from .links import BY_TENSOR, LeftAlone, Link, activation_of, asks_for_sizes, link_of, walk, with_own
from .losses import Loss, Start
from .modes import gradient_modes, modes
from .nodes import name_of, parts_of, position, value_of, viewed_by, where
from .products import Product
from .reading import behind, input_of

# linear="auto" takes up logits of this many bytes and more. One H200, bfloat16, head and loss, the operator beside
# compiled F (`bench --linear 2048`): 125 MiB of logits take as long, 250 MiB 7 and 12 % less with the same memory, and
# from 500 MiB on, 4 to 7 % less with less memory where they are more than a chunk (head/sizes.py).
WORTHWHILE = {"cpu": 64 * 2**20}
WORTHWHILE_ON_GPUS = 250 * 2**20


@dataclass
class Found:
    """A head that the operator can take up, with all between it and the loss."""

    product: Product
    links: list[Link]  # from the loss backwards
    start: Start
    activation: Activation

    @property
    def nodes(self) -> list[fx.Node]:
        """Dead once the operator stands there. The last one first."""
        return [*reversed(self.start.behind), *(link.node for link in self.links), *self.product.nodes]

    @property
    def upcast(self) -> bool:
        return self.start.upcast or any(link.kind == "upcast" for link in self.links)

    @property
    def logits_dtype(self) -> torch.dtype | None:
        """None: that of the operands."""
        return value_of(self.product.node).dtype if self.product.casts else None

    @property
    def views(self) -> list[fx.Node]:
        """From the product to the loss, in order."""
        return [link.node for link in reversed(self.links) if link.kind == "view"] + self.start.views


def find(loss: Loss, linear: bool | str) -> Found | None:
    """The head before ``loss``; None where there is none. Raises LeftAlone where it cannot be taken up."""
    start = loss.start()
    links, source = walk(start.logits, start.readers, tensors=True)
    product = products.of(source)
    if product is None:
        _refuse_other_products(source, loss)
        _refuse_from_outside(source)
        return None
    _refuse_not_worthwhile(loss, product, linear)
    _refuse_twice_normalized(product)
    if not any(link.tensor for link in links):  # by which 16-bit features would be rounded
        product = products.before_casts(product)
    found = Found(product, links, start, with_own(activation_of(links), loss.given))
    _refuse_probabilities(loss)
    _refuse_readers(loss, found)
    _refuse_modes(loss, found)
    _refuse_writers(loss, found)
    _refuse_scales(loss, found)
    return found


def _refuse_other_products(source: fx.Node, loss: Loss) -> None:
    """Raise LeftAlone, for the report, where a head is of another form, or a node that is no link stands behind it."""
    if name_of(source) in products.NAMES:
        raise LeftAlone(f"{source.name} is no product of hidden states (..., H) and a weight (V, H) or (H, V)")
    parts = source.args[0] if name_of(source) == "getitem" else None  # one of several results
    if isinstance(parts, fx.Node) and not isinstance(value_of(parts), Tensor):
        if isinstance(parts.target, torch._ops.HigherOrderOperator):
            raise LeftAlone(f"its logits are made inside of {parts.name}")
        source = parts
    for before in source.all_input_nodes:
        while (link := link_of(before)) is not None:
            before = link.source
        product = products.of(before)
        if product is None:
            continue
        if source is parts or _hint(value_of(product.node).shape[product.dim]) == _classes(loss):
            raise LeftAlone(f"{source.name} stands between the head and the loss")


def _refuse_from_outside(source: fx.Node) -> None:
    """Raise LeftAlone, for the report, where the logits were computed before this graph."""
    value = value_of(source)
    leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf  # nobody's result
    if source.op == "placeholder" and not leaf:
        raise LeftAlone("its logits come into the graph from outside: a graph break or an uncompiled head before it")


def _refuse_scales(loss: Loss, found: Found) -> None:
    """Raise LeftAlone where a tensor that scales the logits cannot scale the features."""
    inputs, tanh_behind = writers.inputs_of(loss.node.graph), False
    for link in reversed(found.links):  # from the product on
        tanh_behind = tanh_behind or link.kind == "tanh"
        if link.tensor is None:
            continue
        if tanh_behind:
            raise LeftAlone(f"{link.node.name} scales the logits by a tensor behind a softcap")
        writer = writers.between(link.node, loss.node, value_of(link.tensor), inputs, set(found.nodes))
        if writer is not None:
            raise LeftAlone(f"{writer.name} may write to the scale of the logits before the loss")


def _classes(loss: Loss) -> int:
    shape = value_of(loss.given["input"]).shape
    return _hint(shape[loss.class_dim])


def _refuse_not_worthwhile(loss: Loss, product: Product, linear: bool | str) -> None:
    if linear is True or is_asked_for(product.node):
        return
    if _is_part(loss.node.graph):
        raise LeftAlone("its gradients would be kept in a checkpointed part; linear=True takes it")
    logits: Tensor = value_of(product.node)
    size = math.prod(map(_hint, logits.shape)) * logits.element_size()
    least = WORTHWHILE.get(logits.device.type, WORTHWHILE_ON_GPUS)
    elements = math.prod(map(_hint, value_of(product.weight).shape))
    if logits.dtype == torch.float16:  # the weight's gradient is added up in float32
        least += 4 * elements
    if _has_other_heads(product):  # each keeps a gradient of the weight until the backward
        least += logits.element_size() * elements
    if size < least:
        raise LeftAlone(f"too small: logits of {_mib(size)} MiB, and {_mib(least)} MiB pay; linear=True takes it")
    if loss.given.get("reduction", "mean") == "none" and value_of(loss.node).requires_grad:
        raise LeftAlone("losses of rows would take a fourth product for gradients; linear=True takes it")


def _refuse_twice_normalized(product: Product) -> None:
    """Raise LeftAlone where Inductor's code for a CPU makes a wrong gradient of the weight: pytorch issue 185702.

    A gradient that Inductor does not fuse with F.normalize of F.normalize is enough, as any operator's is. Torch 2.13
    is wrong, 2.14.1 right.
    """
    if torch.__version__ >= "2.14":
        return
    node, value = behind(product.weight), value_of(product.weight)
    twice = name_of(node) == "normalize" == name_of(behind(input_of(node))) if isinstance(node, fx.Node) else False
    if twice and value.device.type == "cpu":
        raise LeftAlone("Inductor makes a wrong gradient of a weight that is normalised twice, on a CPU")


def _is_part(graph: fx.Graph) -> bool:
    """Is it a graph in a graph, a checkpointed part? Dynamo notes where the inputs of a whole graph come from."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return any("example_value" in node.meta for node in inputs) and not any("grapharg" in node.meta for node in inputs)


def _has_other_heads(product: Product) -> bool:
    """Does another product read the same weight, or its transpose, as where a loss is computed by chunks of rows?"""
    readers = list(product.weight.users)
    for view in product.weight.users:
        if viewed_by(view) is product.weight:
            readers += view.users
    return sum(products.of(node) is not None for node in readers) > 1


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g}"


def _refuse_probabilities(loss: Loss) -> None:
    if loss.is_soft:
        raise LeftAlone("its target is class probabilities, for which all logits are made")


def _refuse_readers(loss: Loss, found: Found) -> None:
    """Raise LeftAlone if anything but the loss reads the logits."""
    made = found.nodes
    mine = {loss.node, *made}
    for node in made:
        for user in node.users:
            if user.op == "output":
                raise LeftAlone(f"its logits are returned ({node.name})")
            if user not in mine and not asks_for_sizes(user):
                raise LeftAlone(f"its logits are read by {user.name} too, {where(user)}")
    others = [one for name, one in loss.given.items() if name != "input"]
    if any(one in mine for one in others if isinstance(one, fx.Node)):
        raise LeftAlone("its logits are its target or weight as well")


def _refuse_modes(loss: Loss, found: Found) -> None:
    mode_of, gradients = modes(loss.node.graph), gradient_modes(loss.node.graph)
    for node in found.nodes:
        if mode_of[node] != mode_of[loss.node]:
            raise LeftAlone(f"{node.name} runs under another autocast or inference mode than the loss")
        if gradients[node] != gradients[loss.node]:
            raise LeftAlone(f"{node.name} runs in another gradient mode than the loss")


def _refuse_writers(loss: Loss, found: Found) -> None:
    """Raise LeftAlone if something writes between the product and the loss to what the operator will read there."""
    product = found.product
    order = position(loss.node.graph)
    first = min((product.node, *product.casts), key=lambda node: order[node])
    inputs = writers.inputs_of(loss.node.graph)
    for name, node in (("input", product.input), ("weight", product.weight), ("bias", product.bias)):
        if node is None:
            continue
        writer = writers.between(first, loss.node, value_of(node), inputs, set(found.nodes))
        if writer is not None:
            raise LeftAlone(f"{writer.name} may write to the {name} of the head before the loss")


def emitted(emit: Emitter, found: Found, loss: Loss) -> FoundHead:
    """What our operator gets, in nodes before the loss. Raises LeftAlone."""
    product = found.product
    options = {name: loss.given[name] for name in ("lse_square_scale",) if name in loss.given}
    options |= found.activation.keywords()
    if found.logits_dtype is not None:
        options["logits_dtype"] = found.logits_dtype
    dtype = value_of(product.input if product.casts else product.node).dtype
    weight = _matrix(emit, product)
    input, bias = _scaled(emit, found, product.input), _scaled(emit, found, product.bias)
    return FoundHead(_hidden(emit, input, found, loss), weight, bias, dtype, options, found.nodes)


def _matrix(emit: Emitter, product: Product) -> fx.Node:
    """The weight as (V, H)."""
    if value_of(product.weight).dim() > 2:  # of a convolution, (V, H, 1, ...)
        return emit("flatten", product.weight, 1)
    return emit("t", product.weight) if product.transposed else product.weight


def _scaled(emit: Emitter, found: Found, operand: Any) -> Any:
    """Input or bias by the tensors that scale the logits."""
    for link in reversed(found.links):
        if operand is not None and link.tensor is not None:
            operand = emit("mul" if link.kind == BY_TENSOR["mul"] else "div", operand, link.tensor)
    return operand


def _hidden(emit: Emitter, hidden: fx.Node, found: Found, loss: Loss) -> fx.Node:
    """The hidden states of the rows that the loss reads, (*target.shape, H): the views of the logits, done to these."""
    dim = found.product.dim
    features = value_of(hidden).shape[dim]
    if not isinstance(features, int):
        features = emit("size", hidden, dim)
    for view in found.views:
        if name_of(view) == "contiguous" or isinstance(value_of(view), (tuple, list)):  # of several results: below
            continue
        dim = _followed(view, dim)
        wanted = [_hint(size) for size in value_of(view).shape]
        wanted[dim] = _hint(value_of(features))
        target, args = view.target, list(view.args[1:])
        if name_of(view) in ("view", "reshape"):
            target = "reshape"  # hidden states may lie otherwise than logits
            shape = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
            shape[dim] = features
            args = [tuple(shape)]
        if (parts := parts_of(view)) is not None:
            hidden = emit(parts.target, hidden, *parts.args[1:], **parts.kwargs)
        hidden = emit(target, hidden, *args, **view.kwargs)
        if [_hint(size) for size in value_of(hidden).shape] != wanted:
            raise LeftAlone(f"{view.name} selects classes")
    if dim != loss.class_dim:
        raise LeftAlone("the classes of the loss are not those of the product")
    return hidden if dim == value_of(hidden).dim() - 1 else emit("movedim", hidden, dim, -1)


def _followed(view: fx.Node, dim: int) -> int:
    """Where a view of the logits puts the dimension of the classes, in real numbers: no guard on a symbolic size."""
    parts = parts_of(view)
    calls = [view] if parts is None else [parts, view]
    before: Tensor = value_of(calls[0].args[0])
    sizes, classes = [_hint(size) for size in before.shape], _hint(before.shape[dim])
    # A probe with stride 1 in this dimension and 0 in the others.
    strides = [0] * len(sizes)
    strides[dim] = 1
    made: Any = torch.empty_strided(sizes, strides, device="meta")
    for call in calls:
        args, kwargs = fx.node.map_arg((call.args[1:], call.kwargs), lambda node: _hint(value_of(node)))
        target: Any = "reshape" if call.target == "view" else call.target
        made = getattr(made, target)(*args, **kwargs) if isinstance(target, str) else target(made, *args, **kwargs)
    found = [index for index, stride in enumerate(made.stride()) if stride != 0 and made.shape[index] != 1]
    if len(found) != 1:
        raise LeftAlone(f"{calls[0].name} does not keep the classes in one dimension")
    if made.shape[found[0]] != classes:
        raise LeftAlone(f"{calls[0].name} selects classes")
    return found[0]


def _hint(size: Any) -> Any:
    """A symbolic size as the number that it has now."""
    if not isinstance(size, torch.SymInt):
        return size
    if size.node.hint is None:
        raise LeftAlone(f"the size {size} is not known")
    return int(size.node.hint)
