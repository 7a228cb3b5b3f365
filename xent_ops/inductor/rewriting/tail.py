"""The tail: the nodes between the matrix product and the loss, such as views, an upcast, a scale, a softcap.

Inductor fuses these into its own cross entropy. Our operator is opaque to Inductor, which writes the operator's input
to memory first. So either the operator takes up the whole tail, by its options, or the call stays with Inductor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ...kernels.options import Activation
from . import writers
from .links import STEPS, LeftAlone, Link, activation_of, walk
from .modes import gradient_modes, modes
from .nodes import is_cast, is_pointwise, name_of, position, share_memory, tensor_of, value_of, viewed_by


@dataclass
class Tail:
    source: fx.Node  # the logits that the operator reads
    views: list[fx.Node]  # from there to the loss, in order
    nodes: list[fx.Node]  # the nodes that are dead once the operator reads the source, the last one first
    upcast: bool
    activation: Activation


def find(loss: fx.Node, logits: fx.Node, readers: set[fx.Node]) -> Tail:
    """The tail of ``logits``, which ``readers`` read for ``loss``. Raises LeftAlone."""
    links, source = walk(logits, readers)
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
        return Tail(logits, [], [], False, Activation())
    source = links[-1].source
    _refuse_shared(links, loss)
    _refuse_unsafe_in_place(links, source, mine)
    if any(tensor_of(link.node).requires_grad != value_of(source).requires_grad for link in links):
        raise LeftAlone("what stands before it was made without gradients")
    mode_of, gradients = modes(loss.graph), gradient_modes(loss.graph)
    for link in links:
        if link.in_place and gradients[link.node] != gradients[loss]:
            raise LeftAlone(f"{link.node.name} runs in another gradient mode")
        if link.computes and mode_of[link.node] != mode_of[loss]:
            raise LeftAlone(f"{link.node.name} runs under another autocast or inference mode")
    graph_inputs = writers.inputs_of(loss.graph)
    writer = writers.between(links[-1].node, loss, value_of(source), graph_inputs, mine)
    if writer is not None:
        raise LeftAlone(f"{writer.name} may write to the logits between {links[-1].node.name} and it")
    activation = activation_of(links)
    views = [link.node for link in reversed(links) if link.kind == "view"]
    return Tail(source, views, [link.node for link in links], any(x.kind == "upcast" for x in links), activation)


def _refuse_fused(source: fx.Node) -> None:
    """Raise LeftAlone if the walk ended at a node that Inductor would have fused."""
    node: fx.Node | None = source
    while node is not None:
        if is_fused(node):
            raise LeftAlone(
                f"{node.name} stands before it: no view, upcast to float32, softcap or scale by a Python number"
            )
        node = viewed_by(node)


def is_fused(node: fx.Node) -> bool:
    """Does Inductor fuse it with what reads it?"""
    made = value_of(node)
    if is_cast(node):
        return isinstance(made, Tensor) and made.dtype != value_of(node.args[0]).dtype
    return is_pointwise(node) or name_of(node) in STEPS


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


def _refuse_shared(links: list[Link], loss: fx.Node) -> None:
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


def _refuse_unsafe_in_place(links: list[Link], source: fx.Node, mine: set[fx.Node]) -> None:
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
