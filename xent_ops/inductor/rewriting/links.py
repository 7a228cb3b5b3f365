"""Links: nodes between the product and the loss that change nothing, or that an option of the operator can replace.

The operator computes ``softcap * tanh(logit_scale * logits / softcap)`` in float32, and rounds nothing in between. So
does Inductor's fused code, even if the model computes in bfloat16.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...kernels.options import Activation
from .nodes import LeftAlone, hint, is_cast, name_of, position, share_memory, value_of

_HALF = (torch.bfloat16, torch.float16)
_LARGEST = sys.float_info.max
_FLOATS = (*_HALF, torch.float32, torch.float64)
# They select or rearrange elements, each at most once. So their backward has no sums that would round in bfloat16.
# expand and index tensors are excluded.
_VIEWS = {
    "T", "contiguous", "flatten", "mT", "movedim", "narrow", "permute", "reshape", "select", "squeeze", "swapaxes",
    "swapdims", "t", "to_dense", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
_CAT = {"cat", "concat", "concatenate"}  # with one tensor
STEPS = {
    **dict.fromkeys(("mul", "multiply", "mul_", "multiply_", "imul"), "mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "div_", "divide_", "true_divide_", "itruediv"), "div"),
    **dict.fromkeys(("neg", "negative", "neg_", "negative_"), "neg"),
    **dict.fromkeys(("tanh", "tanh_"), "tanh"),
}
_SIZES = {"dim", "element_size", "is_contiguous", "numel", "size", "storage_offset", "stride", "sym_size", "sym_stride"}


@dataclass
class Link:
    """One node of the tail."""

    node: fx.Node
    source: fx.Node  # the tensor that it reads
    kind: str  # "view", "same" (a cast or a cat that changes nothing), "upcast", or a value of STEPS
    number: float = 1.0  # the factor or divisor

    @property
    def computes(self) -> bool:
        return self.kind not in ("view", "same")


def walk(node: fx.Node, readers: set[fx.Node]) -> tuple[list[Link], fx.Node]:
    """(the links from the loss backwards, the first node that is no link)."""
    order = position(node.graph)
    links: list[Link] = []
    while True:
        # ``x.div_(c)`` as a statement: later nodes read x, not its result.
        first = min(order[reader] for reader in readers)
        before = [link_of(user) for user in node.users if not user.users and order[user] < first]
        found = [link for link in before if link is not None and link.computes and link.source is node]
        statements = [link for link in found if share_memory(value_of(link.node), value_of(node))]
        links += sorted(statements, key=lambda link: -order[link.node])
        link = link_of(node)
        if link is None:
            return links, node
        links.append(link)
        readers, node = {node}, link.source


def link_of(node: fx.Node) -> Link | None:
    """``node`` as a link, or None if the operator has no option for it."""
    name, result = name_of(node), value_of(node)
    if name is None or not isinstance(result, Tensor):
        return None
    if name in STEPS:
        return _step(node, STEPS[name])
    source = node.args[0] if node.args else None
    if name in _CAT and isinstance(source, (list, tuple)) and len(source) == 1 and isinstance(source[0], fx.Node):
        return Link(node, source[0], "same") if value_of(source[0]).dtype == result.dtype else None
    if not isinstance(source, fx.Node):
        return None
    before = value_of(source)
    if is_cast(node):
        if before.device != result.device:
            return None
        if before.dtype == result.dtype:
            return Link(node, source, "same")
        return Link(node, source, "upcast") if before.dtype in _HALF and result.dtype == torch.float32 else None
    return Link(node, source, "view") if is_view(node) else None


def _step(node: fx.Node, kind: str) -> Link | None:
    """``x * 2``, ``2 * x``, ``torch.div(x, other=2)``; None if the other operand is not a Python number."""
    operands = [*node.args, *(node.kwargs[name] for name in ("input", "other") if name in node.kwargs)]
    if len(operands) != len(node.args) + len(node.kwargs):
        return None  # out=, rounding_mode=
    number: Any = -1.0
    if kind in ("mul", "div") and len(operands) == 2:
        if kind == "mul" and isinstance(operands[1], fx.Node):
            operands.reverse()
        number = operands.pop()
        if type(number) not in (int, float) or not abs(number) <= _LARGEST or (kind == "div" and number == 0):
            return None
    if len(operands) != 1 or not isinstance(operands[0], fx.Node):
        return None
    before, result = value_of(operands[0]), value_of(node)
    if not isinstance(before, Tensor) or before.dtype not in _FLOATS or before.dtype != result.dtype:
        return None
    return Link(node, operands[0], "mul" if kind == "neg" else kind, float(number))


def is_view(node: fx.Node) -> bool:
    """Does it select or rearrange elements of its first argument?"""
    name, result, source = name_of(node), value_of(node), value_of(node.args[0]) if node.args else None
    if not isinstance(result, Tensor) or not isinstance(source, Tensor) or result.dtype != source.dtype:
        return False  # view(dtype) reads the bits as something else
    if name == "getitem":
        index = node.args[1]
        return all(_is_basic(part) for part in (index if isinstance(index, tuple) else (index,)))
    other_inputs = [n for n in node.all_input_nodes if n is not node.args[0]]
    return name in _VIEWS and not any(isinstance(value_of(n), Tensor) for n in other_inputs)


def _is_basic(part: Any) -> bool:
    """Does this part of an index make a view, not a gather?"""
    if isinstance(part, slice):
        return all(_is_basic(bound) for bound in (part.start, part.stop, part.step))
    part = value_of(part)
    return part is None or part is Ellipsis or (isinstance(part, (int, torch.SymInt)) and not isinstance(part, bool))


def followed(view: fx.Node, dim: int) -> int:
    """The dimension after a view that is ``dim`` before it. It uses hints, so symbolic sizes get no guard."""
    if name_of(view) == "contiguous":
        return dim
    sizes = [hint(size) for size in value_of(view.args[0]).shape]
    # A probe with stride 1 in this dimension and 0 in the others.
    probe = torch.empty_strided(sizes, [int(one == dim) for one in range(len(sizes))], device="meta")
    args, kwargs = fx.node.map_arg((view.args[1:], view.kwargs), lambda node: hint(value_of(node)))
    target: Any = "reshape" if view.target == "view" else view.target
    try:
        result = getattr(probe, target)(*args, **kwargs) if isinstance(target, str) else target(probe, *args, **kwargs)
    except (RuntimeError, ValueError) as error:
        raise LeftAlone(f"{view.name} does not keep the classes in one dimension") from error
    found = [index for index, stride in enumerate(result.stride()) if stride != 0 and result.shape[index] != 1]
    if len(found) != 1:
        raise LeftAlone(f"{view.name} does not keep the classes in one dimension")
    if result.shape[found[0]] != sizes[dim]:
        raise LeftAlone(f"{view.name} selects classes")
    return found[0]


def asks_for_sizes(user: fx.Node) -> bool:
    return name_of(user) in _SIZES or (user.target is getattr and user.args[1] in ("shape", "dtype", "device"))


def activation_of(links: list[Link], call_args: dict[str, Any]) -> Activation:
    """The activation of the links and of our own loss behind them. ``a * tanh(b * x)``: softcap a, scale a * b."""
    before, after, tanh = 1.0, 1.0, False  # the products of the factors before and after the tanh
    for link in reversed(links):
        if link.kind == "tanh":
            if tanh:
                raise LeftAlone(f"{link.node.name} is a second softcap; the operator has one")
            before, after, tanh = after, 1.0, True
        elif link.kind in ("mul", "div"):
            after = after * link.number if link.kind == "mul" else after / link.number
    if not math.isfinite(before * after):
        raise LeftAlone("the product of its scales is not finite")
    if before * after == 0.0:
        raise LeftAlone("its logits are multiplied by 0")
    own = Activation(**{name: call_args[name] for name in Activation._fields if name in call_args})
    if any(isinstance(value, fx.Node) for value in own):
        raise LeftAlone("its softcap or logit_scale is computed in the graph")
    if not tanh:
        return Activation(own.softcap, after * own.logit_scale)
    if own.softcap is not None:
        raise LeftAlone("a softcap stands before it, and it has another; the operator has one")
    scale = before * after
    # c * (x * (1 / c)) differs from x by one rounding
    scale = 1.0 if abs(scale - 1.0) < 1e-14 else scale
    # s * (c * tanh(x)) = (s * c) * tanh(x), and tanh is odd
    return Activation(abs(after * own.logit_scale), scale * own.logit_scale)
