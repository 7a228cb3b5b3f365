"""The tail: the nodes between the matrix product and the loss, such as views, an upcast, a scale, a softcap.

Inductor fuses these into its own cross entropy. Our operator is opaque to Inductor, which writes the operator's input
to memory first. So either the operator takes up the whole tail, by its options, or the call stays with Inductor.

The operator computes ``softcap * tanh(logit_scale * logits / softcap)`` in float32, and rounds nothing in between. So
does Inductor's fused code, even where the model computes in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from . import writers
from .modes import modes
from .nodes import is_cast, is_pointwise, name_of, position, share_memory, value_of, viewed_by

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (*_HALF, torch.float32, torch.float64)
# They select or rearrange elements, each at most once. So their backward sums nothing, and loses nothing in bfloat16.
# expand and index tensors are not among them.
_VIEWS = {
    "contiguous", "flatten", "movedim", "narrow", "permute", "reshape", "select", "squeeze", "swapaxes", "swapdims",
    "t", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
_STEPS = {
    **dict.fromkeys(("mul", "multiply", "mul_", "multiply_", "imul"), "mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "div_", "divide_", "true_divide_", "itruediv"), "div"),
    **dict.fromkeys(("neg", "negative", "neg_", "negative_"), "neg"),
    **dict.fromkeys(("tanh", "tanh_"), "tanh"),
}
_SIZES = {"dim", "element_size", "is_contiguous", "numel", "size", "storage_offset", "stride", "sym_size", "sym_stride"}


class LeftAlone(Exception):
    """Why a call is not replaced."""


@dataclass
class _Link:
    """One node of the tail."""

    node: fx.Node
    source: fx.Node  # the tensor that it reads
    kind: str  # "view", "same" (a cast that changes nothing), "upcast", or a value of _STEPS
    number: float = 1.0  # the factor or divisor
    shared_with: fx.Node | None = None  # a reader of the node outside the tail

    @property
    def computes(self) -> bool:
        return self.kind not in ("view", "same")

    @property
    def in_place(self) -> bool:
        return self.computes and share_memory(value_of(self.node), value_of(self.source))


@dataclass
class Tail:
    source: fx.Node  # the logits that the operator reads
    views: list[fx.Node]  # from there to the loss, in order
    nodes: list[fx.Node]  # the nodes that are dead once the operator reads the source, the last one first
    upcast: bool
    softcap: float | None
    logit_scale: float


def find(loss: fx.Node, logits: fx.Node, reader: fx.Node) -> Tail:
    """The tail of ``logits``, which ``reader`` reads for ``loss``. Raises LeftAlone."""
    links, source = _walk(logits, reader)
    _refuse_fused(source)
    taken = len(links)
    while taken and not links[taken - 1].computes:  # views of the source may stay, even with other readers
        taken -= 1
    rest, links = links[taken:], links[:taken]
    written = rest[0].node if rest else source
    mine = {link.node for link in links}
    writer = _fused_writer(written, loss, mine)
    if writer is not None:
        raise LeftAlone(f"{writer.name} writes to the logits before it, which Inductor fuses with it")
    if not links:
        return Tail(logits, [], [], False, None, 1.0)
    source = links[-1].source
    _refuse_shared(links, loss)
    _refuse_unsafe_in_place(links, source, mine)
    if any(value_of(link.node).requires_grad != value_of(source).requires_grad for link in links):
        raise LeftAlone("what stands before it was made without gradients")
    mode_of = modes(loss.graph)
    for link in links:
        if link.computes and mode_of[link.node] != mode_of[loss]:
            raise LeftAlone(f"{link.node.name} runs under another autocast or inference mode")
    graph_inputs = writers.inputs_of(loss.graph)
    writer = writers.between(links[-1].node, loss, value_of(source), graph_inputs, mine)
    if writer is not None:
        raise LeftAlone(f"{writer.name} may write to the logits between {links[-1].node.name} and it")
    softcap, scale = _options(links)
    views = [link.node for link in reversed(links) if link.kind == "view"]
    return Tail(source, views, [link.node for link in links], any(x.kind == "upcast" for x in links), softcap, scale)


def _walk(node: fx.Node, reader: fx.Node) -> tuple[list[_Link], fx.Node]:
    """(the links from the loss backwards, the first node that is no link)."""
    order = position(node.graph)
    links: list[_Link] = []
    while True:
        # ``x.div_(c)`` as a statement: later nodes read x, not its result.
        before = [user for user in node.users if not user.users and order[user] < order[reader]]
        statements = [link for user in before if (link := _link(user)) and link.in_place and link.source is node]
        statements.sort(key=lambda link: order[link.node], reverse=True)
        links += statements
        link = _link(node)
        if link is None:
            return links, node
        mine = {reader, *(statement.node for statement in statements)}
        others = [user for user in node.users if user not in mine and not _asks_for_sizes(user)]
        link.shared_with = others[0] if others else None
        links.append(link)
        reader, node = node, link.source


def _link(node: fx.Node) -> _Link | None:
    """``node`` as a link, or None if the operator has no option for it."""
    name, made = name_of(node), value_of(node)
    if name is None or not isinstance(made, Tensor):
        return None
    if name in _STEPS:
        return _step(node, _STEPS[name])
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(value_of(source), Tensor):
        return None
    before = value_of(source)
    if is_cast(node):
        if before.device != made.device:
            return None
        if before.dtype == made.dtype:
            return _Link(node, source, "same")
        return _Link(node, source, "upcast") if before.dtype in _HALF and made.dtype == torch.float32 else None
    return _Link(node, source, "view") if is_view(node) else None


def _step(node: fx.Node, kind: str) -> _Link | None:
    """``x * 2``, ``2 * x``, ``torch.div(x, other=2)``; None where the other operand is not a Python number."""
    operands = [*node.args, *(node.kwargs[name] for name in ("input", "other") if name in node.kwargs)]
    if len(operands) != len(node.args) + len(node.kwargs):
        return None  # out=, rounding_mode=
    number = -1.0
    if kind in ("mul", "div") and len(operands) == 2:
        if kind == "mul" and isinstance(operands[1], fx.Node):
            operands.reverse()
        found = _number(operands.pop())
        if found is None or (kind == "div" and found == 0.0):
            return None
        number = found
    if len(operands) != 1 or not isinstance(operands[0], fx.Node):
        return None
    before, made = value_of(operands[0]), value_of(node)
    if not isinstance(before, Tensor) or before.dtype not in _FLOATS or before.dtype != made.dtype:
        return None
    return _Link(node, operands[0], "mul" if kind == "neg" else kind, number)


def _number(operand: Any) -> float | None:
    if type(operand) not in (int, float):
        return None
    try:
        number = float(operand)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_view(node: fx.Node) -> bool:
    """Does it select or rearrange elements of its first argument?"""
    name, made, source = name_of(node), value_of(node), value_of(node.args[0]) if node.args else None
    if not isinstance(made, Tensor) or not isinstance(source, Tensor) or made.dtype != source.dtype:
        return False  # view(dtype) reads the bits as something else
    if name == "getitem":
        index = node.args[1]
        return all(_is_basic(part) for part in (index if isinstance(index, tuple) else (index,)))
    others = [n for n in node.all_input_nodes if n is not node.args[0]]
    return name in _VIEWS and not any(isinstance(value_of(n), Tensor) for n in others)


def _is_basic(part: Any) -> bool:
    """Does this part of an index make a view, not a gather?"""
    if isinstance(part, slice):
        return all(_is_basic(bound) for bound in (part.start, part.stop, part.step))
    part = value_of(part)
    return part is None or part is Ellipsis or (isinstance(part, (int, torch.SymInt)) and not isinstance(part, bool))


def _asks_for_sizes(user: fx.Node) -> bool:
    return name_of(user) in _SIZES or (user.target is getattr and user.args[1] in ("shape", "dtype", "device"))


def _refuse_fused(source: fx.Node) -> None:
    """Raise LeftAlone if the walk ended at a node that Inductor would have fused."""
    node: fx.Node | None = source
    while node is not None:
        if _is_fused(node):
            raise LeftAlone(
                f"{node.name} stands before it: no view, upcast to float32, softcap or scale by a Python number"
            )
        node = viewed_by(node)


def _is_fused(node: fx.Node) -> bool:
    made = value_of(node)
    if is_cast(node):
        return isinstance(made, Tensor) and made.dtype != value_of(node.args[0]).dtype
    return is_pointwise(node) or name_of(node) in _STEPS


def _fused_writer(written: fx.Node, loss: fx.Node, mine: set[fx.Node]) -> fx.Node | None:
    """A pointwise operator outside the tail that writes to the logits in place before the loss."""
    order, memory = position(loss.graph), value_of(written)
    for node in loss.graph.nodes:
        if node is loss:
            return None
        if node in mine or not is_pointwise(node):
            continue
        if any(share_memory(value_of(one), memory) for one in writers.written_by(node)) and order[node] < order[loss]:
            return node
    return None


def _refuse_shared(links: list[_Link], loss: fx.Node) -> None:
    inputs = [one for one in loss.all_input_nodes if one is not links[0].node]
    for link in links:
        other = link.shared_with
        if other is not None:
            how = "is returned as well" if other.op == "output" else f"is read by {other.name} as well"
            raise LeftAlone(f"{link.node.name} {how}")
        if link.node in inputs or (link is links[0] and _times(loss, link.node) > 1):
            raise LeftAlone(f"{link.node.name} is its target or weight as well")


def _times(reader: fx.Node, node: fx.Node) -> int:
    found: list[fx.Node] = []
    fx.node.map_arg((reader.args, reader.kwargs), found.append)
    return found.count(node)


def _refuse_unsafe_in_place(links: list[_Link], source: fx.Node, mine: set[fx.Node]) -> None:
    """Raise LeftAlone if another node can see what an in-place link writes."""
    written = next((link for link in links if link.in_place), None)
    if written is None or not any(share_memory(value_of(x.node), value_of(source)) for x in links if x.in_place):
        return
    allowed, base = {source, *mine}, source
    while (parent := viewed_by(base)) is not None and len(parent.users) == 1:
        allowed.add(parent)
        base = parent
    for node in source.graph.nodes:
        seen = share_memory(value_of(node), value_of(source)) and node not in allowed
        if seen or (node not in mine and source in node.all_input_nodes):
            raise LeftAlone(f"{written.node.name} writes in place to what {node.name} reads or is a view of")
    if base.op not in ("call_function", "call_method") or isinstance(base.target, torch._ops.HigherOrderOperator):
        raise LeftAlone(f"{written.node.name} writes in place to {base.name}, an input")


def _options(links: list[_Link]) -> tuple[float | None, float]:
    """(softcap, logit_scale): of ``a * tanh(b * x)``, a cap of a and a scale of a * b."""
    caps = [index for index, link in enumerate(links) if link.kind == "tanh"]
    if len(caps) > 1:
        raise LeftAlone(f"{links[caps[1]].node.name} is a second softcap; the operator has one")
    after = _product(links[: caps[0]] if caps else [])
    before = _product(links[caps[0] :] if caps else links)
    if not caps:
        return None, before
    scale = after * before
    # c * (x * (1 / c)) differs from x by one rounding
    scale = 1.0 if abs(scale - 1.0) < 1e-14 else scale
    if after < 0.0:  # tanh is odd
        return -after, scale
    if after == 0.0:
        raise LeftAlone("its logits are multiplied by 0")
    return after, scale


def _product(links: list[_Link]) -> float:
    """The product of the factors, in the order in which the model applies them."""
    product = 1.0
    for link in reversed(links):
        if link.kind == "mul":
            product *= link.number
        elif link.kind == "div":
            product /= link.number
    if not math.isfinite(product):
        raise LeftAlone("the product of its scales is not finite")
    return product
