"""The tail: the nodes between the matrix product and the loss, such as views, an upcast, a scale, a softcap.

Inductor fuses these into its own cross entropy. Our operator is opaque to Inductor, so Inductor writes its input to
memory first. So either the operator's options replace the whole tail, or the call stays with Inductor.
"""

from __future__ import annotations

from torch import Tensor, fx

from . import region, writers
from .links import STEPS
from .losses import Loss
from .nodes import LeftAlone, is_cast, is_pointwise, name_of, share_memory, value_of, viewed_by
from .path import Path, path_to


def find(loss: Loss) -> Path:
    """The tail of the logits that ``loss`` reads. Raises LeftAlone."""
    tail = path_to(loss)
    _refuse_fused(tail.source)
    while tail.links and not tail.links[-1].computes:  # views of the source may stay, even with other readers
        tail.source = tail.links.pop().node
    _refuse_fused_writer(tail)
    region.refuse(tail)
    return tail


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
    """Does Inductor fuse it with its readers?"""
    result = value_of(node)
    if is_cast(node):
        return isinstance(result, Tensor) and result.dtype != value_of(node.args[0]).dtype
    return is_pointwise(node) or name_of(node) in STEPS


def _refuse_fused_writer(tail: Path) -> None:
    """Raise LeftAlone if a pointwise operator outside the tail writes to the logits in place before the loss."""
    memory, mine = value_of(tail.source), {link.node for link in tail.links}
    for node in tail.loss.node.graph.nodes:
        if node is tail.loss.node:
            return
        if node in mine or not is_pointwise(node):
            continue
        if any(share_memory(value_of(one), memory) for one in writers.written_by(node)):
            raise LeftAlone(f"{node.name} writes to the logits before it, which Inductor fuses with it")
