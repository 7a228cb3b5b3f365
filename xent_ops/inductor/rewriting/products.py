"""Recognises the head: a product of hidden states (..., H) with a weight of H features by V classes.

It knows F.linear, inner, matmul, mm, addmm and einsum, and an addition of the bias after them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from .links import link_of
from .nodes import name_of, value_of, viewed_by

_ADDITIONS = {"add", "add_", "iadd"}
_ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "inner": ("input", "other"),
    "mm": ("input", "mat2"),
    "addmm": ("input", "mat1", "mat2", "beta", "alpha"),
}
# Names of matrix multiplications, for heads and others.
NAMES = {*_ARGUMENTS, "einsum", "tensordot", "bmm", "baddbmm", "addbmm", "conv1d", "conv2d", "conv3d"}


@dataclass
class Product:
    """Logits (..., V), the classes last."""

    node: fx.Node  # reads the input and the weight
    input: fx.Node  # (..., H)
    weight: fx.Node
    transposed: bool  # the weight is (H, V), not (V, H)
    bias: fx.Node | None = None  # (V,); by an addition also (1, V)
    addition: fx.Node | None = None  # adds the bias, if the product does not
    casts: bool = False  # the model casts the 16-bit input, weight and bias to float32
    past: tuple[fx.Node, ...] = ()  # these casts and a transpose of the weight: the product reads them, ours does not

    @property
    def reads(self) -> list[tuple[str, fx.Node]]:
        """The operands, by their names in the report."""
        bias = [] if self.bias is None else [("bias", self.bias)]
        return [("input of the head", self.input), ("weight of the head", self.weight), *bias]

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes of the head, the last one first."""
        return [self.node] if self.addition is None else [self.addition, self.node]


def of(node: fx.Node) -> Product | None:
    """The head that computes ``node``, or None."""
    if name_of(node) in _ADDITIONS:
        return _with_bias(node)
    product = _einsum(node) if name_of(node) == "einsum" else _operands(node)
    if product is None:
        return None
    result, *operands = (value_of(one) for one in (node, *(read for _, read in product.reads)))
    if not all(isinstance(one, Tensor) for one in (result, *operands)):
        return None
    input, weight, *bias = operands
    if weight.dim() != 2 or input.dim() < 1 or result.dim() != input.dim():
        return None
    return _seen_through(product) if all(one.shape == result.shape[-1:] for one in bias) else None


def before_casts(product: Product) -> Product:
    """Replace a float32 product of upcast 16-bit operands by the product of these operands, with float32 logits."""
    operands = [node for _, node in product.reads]
    links = [link_of(node) for node in operands]
    sources: list[Any] = [link.source for link in links if link is not None and link.kind == "upcast"]
    dtypes = {value_of(source).dtype for source in sources}
    if len(sources) < len(operands) or len(dtypes) > 1 or value_of(product.node).dtype != torch.float32:
        return product
    input, weight, bias = sources if len(sources) == 3 else (*sources, None)
    past = (*product.past, *operands)
    return _seen_through(replace(product, input=input, weight=weight, bias=bias, casts=True, past=past))


def _operands(node: fx.Node) -> Product | None:
    name = name_of(node) or ""
    names = _ARGUMENTS.get(name)
    if names is None or len(node.args) > len(names) or not node.kwargs.keys() <= {*names}:
        return None
    call_args: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    if any(call_args.get(one, 1) != 1 for one in ("beta", "alpha")):
        return None
    operands = [call_args.get(one) for one in names[:3]]
    if name == "addmm":
        operands.append(operands.pop(0))
    input, weight, bias = (*operands, None)[:3]
    if not (isinstance(input, fx.Node) and isinstance(weight, fx.Node)):
        return None
    return Product(node, input, weight, name not in ("linear", "inner"), bias)


def _einsum(node: fx.Node) -> Product | None:
    """``bsh,vh->bsv``: the features are the last letter of an operand, the classes the last letter of the result."""
    if len(node.args) < 2 or node.kwargs:
        return None
    operands: list[Any]
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    found = re.fullmatch(r"([^,>]+),([^,>]+)->([^,>]+)", str(equation).replace(" ", ""))
    if found is None or len(operands) != 2:
        return None
    left, right, result = (re.findall(r"\.\.\.|\w", part) for part in found.groups())
    for letters, weight_letters, input, weight in ((left, right, *operands), (right, left, *reversed(operands))):
        rows, features, classes = letters[:-1], letters[-1], result[-1]
        once = len({*letters, classes}) == len(letters) + 1
        if once and result == [*rows, classes] and weight_letters in ([classes, features], [features, classes]):
            return Product(node, input, weight, weight_letters == [features, classes])
    return None


def _with_bias(node: fx.Node) -> Product | None:
    """A product with one reader, plus a vector with one number for each class."""
    if len(node.args) != 2 or node.kwargs:
        return None
    in_place = name_of(node) != "add"  # then it writes to the first operand
    for logits, bias in (node.args,) if in_place else (node.args, node.args[::-1]):
        if not (isinstance(logits, fx.Node) and isinstance(bias, fx.Node)):
            return None
        product = None if name_of(logits) in _ADDITIONS else of(logits)
        before, vector, result = value_of(logits), value_of(bias), value_of(node)
        if product is None or product.bias is not None or len(logits.users) > 1 or not isinstance(vector, Tensor):
            continue
        shape = (*(1,) * (vector.dim() - 1), *before.shape[-1:])  # BART adds (1, V)
        if vector.shape == shape and result.shape == before.shape and vector.dtype == before.dtype == result.dtype:
            return replace(product, bias=bias, addition=node)
    return None


def _seen_through(product: Product) -> Product:
    """The product of the weight itself, if it reads the weight's transpose."""
    parent = viewed_by(product.weight)
    if not product.transposed or parent is None:
        return product
    view, base = value_of(product.weight), value_of(parent)
    same = base.dim() == 2 and view.shape == base.t().shape and view.stride() == base.t().stride()
    if not same or view.storage_offset() != base.storage_offset():
        return product
    return replace(product, weight=parent, transposed=False, past=(*product.past, product.weight))
