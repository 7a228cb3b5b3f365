"""The tail: the nodes between the matrix product and the loss, such as views, an upcast, a scale, a softcap.

Inductor fuses these into its own cross entropy. Our operator is opaque to Inductor, so Inductor writes its input to
memory first. So either the operator's options replace the whole tail, or the call stays with Inductor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from ...kernels.options import Activation
from . import writers
from .links import STEPS, activation_of, walk
from .nodes import LeftAlone, is_cast, is_pointwise, name_of, share_memory, value_of, viewed_by


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
    remaining, links = links[taken:], links[:taken]
    written = remaining[0].node if remaining else source
    mine = {link.node for link in links}
    writer = _fused_writer(written, loss, mine)
    if writer is not None:
        raise LeftAlone(f"{writer.name} writes to the logits before it, which Inductor fuses with it")
    if not links:
        return Tail(logits, [], [], False, Activation())
    source = links[-1].source
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
    """Does Inductor fuse it with its readers?"""
    result = value_of(node)
    if is_cast(node):
        return isinstance(result, Tensor) and result.dtype != value_of(node.args[0]).dtype
    return is_pointwise(node) or name_of(node) in STEPS


def _fused_writer(written: fx.Node, loss: fx.Node, mine: set[fx.Node]) -> fx.Node | None:
    """A pointwise operator outside the tail that writes to the logits in place before the loss."""
    memory = value_of(written)
    for node in loss.graph.nodes:
        if node is loss:
            return None
        if node in mine or not is_pointwise(node):
            continue
        if any(share_memory(value_of(one), memory) for one in writers.written_by(node)):
            return node
    return None
