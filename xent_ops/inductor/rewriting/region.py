"""Decides whether our operator may replace a region. A wrong yes gives wrong numbers, so only this file decides.

A region is the nodes between the inputs of our operator and the loss. They are dead once ours replaces the loss. So

- nothing else may read them, or see their in-place writes,
- they must pass on gradients like ours,
- they must compute in the modes of the loss,
- nothing may write to our operator's inputs between the region's read and the loss.

``refuse_written_after`` checks the same for the tensors that ours saves for its backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from . import writers
from .links import asks_for_sizes, link_of
from .modes import gradient_modes, modes
from .nodes import LeftAlone, position, share_memory, value_of, viewed_by, where


@dataclass
class Region:
    loss: fx.Node
    nodes: list[fx.Node]
    reads: list[tuple[str, fx.Node | None]]  # the inputs of our operator, by their names in the report
    past: tuple[fx.Node, ...] = ()  # casts and views that ours does not read; they stay for other readers

    def refuse(self) -> None:
        """Raise LeftAlone unless ours may replace the nodes."""
        self._refuse_readers()
        self._refuse_seen_writes()
        self._refuse_without_gradients()
        self._refuse_modes()
        self._refuse_written_between()

    def _refuse_readers(self) -> None:
        mine = {self.loss, *self.nodes}
        for node in self.nodes:
            for user in node.users:
                if user.op == "output":
                    raise LeftAlone(f"{node.name} is returned as well, {where(node)}")
                if user not in mine and not asks_for_sizes(user):
                    raise LeftAlone(f"{node.name} is read by {user.name} as well, {where(user)}")
            if any(read is node for _, read in self.reads):
                raise LeftAlone(f"{node.name} is its target or weight as well")

    def _refuse_seen_writes(self) -> None:
        """Raise LeftAlone if something outside sees the region's in-place writes: our operator does not write."""
        for node in self.nodes:
            written = [value_of(one) for one in writers.written_by(node)]
            for _, read in self.reads:
                if read is not None and any(share_memory(one, value_of(read)) for one in written):
                    self._refuse_others_who_see(read, node)

    def _refuse_others_who_see(self, read: fx.Node, writer: fx.Node) -> None:
        base, mine = read, {read, *self.nodes}
        while (parent := viewed_by(base)) is not None and len(parent.users) == 1:
            mine.add(parent)
            base = parent
        for node in read.graph.nodes:
            seen = share_memory(value_of(node), value_of(read)) and node not in mine
            if seen or (node not in self.nodes and read in node.all_input_nodes):
                raise LeftAlone(f"{writer.name} writes in place to what {node.name} reads or is a view of")
        if base.op not in ("call_function", "call_method") or isinstance(base.target, torch._ops.HigherOrderOperator):
            raise LeftAlone(f"{writer.name} writes in place to {base.name}, an input")

    def _refuse_without_gradients(self) -> None:
        gradients = gradient_modes(self.loss.graph)  # a view created without them still has requires_grad
        for node in (*self.nodes, *self.past) if gradients[self.loss] else ():
            if not gradients[node] and any(_requires_grad(one) for one in node.all_input_nodes):
                raise LeftAlone(f"{node.name} was made without gradients")

    def _refuse_modes(self) -> None:
        mode_of = modes(self.loss.graph)
        for node in self.nodes:
            link = link_of(node)
            if (link is None or link.computes) and mode_of[node] != mode_of[self.loss]:
                raise LeftAlone(f"{node.name} runs under another autocast or inference mode")

    def _refuse_written_between(self) -> None:
        inputs, order = writers.inputs_of(self.loss.graph), position(self.loss.graph)
        nodes = sorted((*self.nodes, *self.past), key=lambda node: order[node])
        for what, read in self.reads:
            if read is None:
                continue
            first = next((node for node in nodes if read in node.all_input_nodes), None)
            if first is None and read in self.loss.all_input_nodes:
                continue  # the loss itself reads it, as ours does
            first = first or nodes[0]
            writer = writers.between(first, self.loss, value_of(read), inputs, set(self.nodes))
            if writer is not None:
                raise LeftAlone(f"{writer.name} may write to the {what} between {first.name} and it")


def refuse_written_after(loss: fx.Node, saved: Iterable[tuple[str, fx.Node]]) -> None:
    """Raise LeftAlone if something may write to a tensor that ours saves for its backward."""
    for what, node in saved if value_of(loss).requires_grad else ():
        if (writer := writers.after(loss, [value_of(node)])) is not None:
            raise LeftAlone(f"{writer.name} may write to the {what} after it, whose backward needs it")


def _requires_grad(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.requires_grad
