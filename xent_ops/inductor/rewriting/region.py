"""Decides whether our operator may replace a region. A wrong yes gives wrong numbers, so only this file decides.

A region is the nodes between the inputs of our operator and the loss. They are dead once ours replaces the loss. So

- nothing else may read them, or see what they write in place or to ``out=``,
- they must pass on gradients like ours,
- they must compute in the modes of the loss,
- nothing may write to our operator's inputs between the region's read and the loss,
- nothing may write after the loss to what our operator saves for its backward.
"""

from __future__ import annotations

import torch
from torch import fx

from . import writers
from .links import asks_for_sizes, link_of
from .modes import modes
from .nodes import LeftAlone, position, share_memory, value_of, viewed_by, where
from .path import Path


def refuse(path: Path) -> None:
    """Raise LeftAlone unless ours may replace the nodes of the path and its loss."""
    _refuse_readers(path)
    _refuse_seen_writes(path)
    _refuse_modes(path)
    _refuse_written_between(path)
    _refuse_written_after(path)


def _refuse_readers(path: Path) -> None:
    mine = {path.loss.node, *path.nodes}
    for node in path.nodes:
        for user in node.users:
            if user.op == "output":
                raise LeftAlone(f"{node.name} is returned as well, {where(node)}")
            if user not in mine and not asks_for_sizes(user):
                raise LeftAlone(f"{node.name} is read by {user.name} as well, {where(user)}")
        if any(read is node for _, read in path.reads):
            raise LeftAlone(f"{node.name} is its target or weight as well")


def _refuse_seen_writes(path: Path) -> None:
    """Raise LeftAlone if something outside may see the region's writes: our operator does not write."""
    for node in path.nodes:
        if node.kwargs.get("out") is not None:
            raise LeftAlone(f"{node.name} writes to its out=")
        written = [value_of(one) for one in writers.written_by(node)]
        for _, read in path.reads:
            if any(share_memory(one, value_of(read)) for one in written):
                _refuse_others_who_see(read, node, {*path.nodes})


def _refuse_others_who_see(read: fx.Node, writer: fx.Node, region: set[fx.Node]) -> None:
    base, mine = read, {read, *region}
    while (parent := viewed_by(base)) is not None and len(parent.users) == 1:
        mine.add(parent)
        base = parent
    for node in read.graph.nodes:
        seen = share_memory(value_of(node), value_of(read)) and node not in mine
        if seen or (node not in region and read in node.all_input_nodes):
            raise LeftAlone(f"{writer.name} writes in place to what {node.name} reads or is a view of")
    if base.op not in ("call_function", "call_method") or isinstance(base.target, torch._ops.HigherOrderOperator):
        raise LeftAlone(f"{writer.name} writes in place to {base.name}, an input")


def _refuse_modes(path: Path) -> None:
    at = modes(path.loss.node.graph)
    at_loss = at[path.loss.node]
    for node in (*path.nodes, *path.past) if at_loss.gradients else ():
        # Its own requires_grad does not tell: a view that is created without gradients still has it.
        tensors = [value_of(one) for one in node.all_input_nodes]
        if not at[node].gradients and any(getattr(one, "requires_grad", False) for one in tensors):
            raise LeftAlone(f"{node.name} was made without gradients")
    for node in path.nodes:
        link = link_of(node)
        if (link is None or link.computes) and at[node].contexts != at_loss.contexts:
            raise LeftAlone(f"{node.name} runs under another autocast or inference mode")


def _refuse_written_between(path: Path) -> None:
    loss = path.loss.node
    inputs, order = writers.inputs_of(loss.graph), position(loss.graph)
    nodes = sorted((*path.nodes, *path.past), key=lambda node: order[node])
    for what, read in path.reads:
        first = next((node for node in nodes if read in node.all_input_nodes), None)
        if first is None and read in loss.all_input_nodes:
            continue  # the loss itself reads it, as ours does
        first = first or nodes[0]
        writer = writers.between(first, loss, value_of(read), inputs, set(path.nodes))
        if writer is not None:
            raise LeftAlone(f"{writer.name} may write to the {what} between {first.name} and it")


def _refuse_written_after(path: Path) -> None:
    """Raise LeftAlone if something may write to a tensor that our operator saves for its backward."""
    loss = path.loss
    saved = {name: node for name, node in path.reads if name != "weight" and (name != "target" or loss.saves_target)}
    for what, node in saved.items() if value_of(loss.node).requires_grad else ():
        if (writer := writers.after(loss.node, value_of(node))) is not None:
            raise LeftAlone(f"{writer.name} may write to the {what} after it, whose backward needs it")
