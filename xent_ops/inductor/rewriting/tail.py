"""The tail: the nodes between the matrix product and the loss, such as views, an upcast, a scale, a softcap.

Inductor fuses these into its own cross entropy. Our operator is opaque to Inductor, so Inductor writes its input to
memory first. So either the operator's options replace the whole tail, or the call stays with Inductor.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from . import region, writers
from .emitter import Emitter
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


def emit_loss(emit: Emitter, tail: Path) -> fx.Node:
    """Our operator in place of the loss and its tail. Raises LeftAlone."""
    call, call_args = tail.loss, tail.loss.arguments(emit)
    reduction = call_args.get("reduction", "mean")
    options = {"label_smoothing": call_args.get("label_smoothing", 0.0), **tail.activation.keywords()}
    logits = _classes_last(emit, _with_views(emit, tail), call.class_dim)
    target = _classes_last(emit, call_args["target"], call.class_dim) if call.is_soft else call_args["target"]
    operands = logits, target, call_args.get("weight")
    if not call.is_soft:
        options |= {"ignore_index": call_args.get("ignore_index", -100), "reduction": reduction}
        return emit(torch.ops.xent.cross_entropy.default, *operands, **options)
    # torch accepts any numbers as probabilities, and written-out sums have other uses, such as policy gradients.
    rows = emit(torch.ops.xent.soft_cross_entropy_forward.default, *operands, False, **options)
    loss = emit(operator.getitem, rows, 0)
    return loss if reduction == "none" else emit(reduction, loss)  # the methods sum and mean


def _with_views(emit: Emitter, tail: Path) -> fx.Node:
    """The views of the tail, applied to the logits before it."""
    node = tail.source
    for view in tail.views:
        # The upcast of a slice is dense, the slice is not. If it cannot be viewed, reshape copies it.
        target = "reshape" if view.target == "view" else view.target
        node = emit(target, node, *view.args[1:], **view.kwargs)
    return node


def _classes_last(emit: Emitter, tensor: fx.Node, dim: int) -> fx.Node:
    if dim == value_of(tensor).dim() - 1:
        return tensor
    tensor = emit("movedim", tensor, dim, -1)
    # It is dense already if the model transposed to get its (N, C, d1).
    return tensor if value_of(tensor).stride(-1) == 1 else emit("contiguous", tensor)
