"""Finds the losses in a graph: F.cross_entropy, F.nll_loss of a log-softmax (the same loss), and our own.

by_hand.py finds losses that a model writes out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .emitter import Emitter
from .links import followed, is_view
from .nodes import LeftAlone, name_of, value_of
from .reading import arguments_of, before_upcasts, behind, input_of

_SIGNATURES = {F.cross_entropy: inspect.signature(F.cross_entropy), F.nll_loss: inspect.signature(F.nll_loss)}
_OWN = (torch.ops.xent.cross_entropy, torch.ops.xent.cross_entropy.default)


@dataclass
class Loss:
    """A call of F.cross_entropy, F.nll_loss or xent_ops.cross_entropy."""

    node: fx.Node
    call_args: dict[str, Any]  # its arguments, by name
    why: str = ""  # why it is left alone, if the search shows it already

    remedy = ""  # for the report, if it is left alone

    @property
    def is_nll(self) -> bool:
        return self.node.target is F.nll_loss

    @property
    def is_own(self) -> bool:
        """Is it xent_ops.cross_entropy? Then the pass can only replace it together with its head."""
        return self.node.target in _OWN

    @property
    def is_soft(self) -> bool:
        """Is the target class probabilities?"""
        return bool(value_of(self.call_args["target"]).dim() == value_of(self.call_args["input"]).dim())

    @property
    def nodes(self) -> set[fx.Node]:
        """The loss node, and the log-softmax that it reads, if any."""
        return {self.node, behind(self.call_args.get("input"))}

    @property
    def class_dim(self) -> int:
        dims: int = value_of(self.call_args["input"]).dim()
        return dims - 1 if self.is_own or dims == 1 else 1

    @property
    def title(self) -> str:
        """Its name in the report, if it is not F.cross_entropy."""
        return "nll_loss" if self.is_nll else "xent" if self.is_own else ""

    def arguments(self, emit: Emitter) -> dict[str, Any]:
        """The arguments of F.cross_entropy."""
        return self.call_args

    def finished(self, emit: Emitter, loss: fx.Node) -> fx.Node:
        """The replacement of the node, computed from our loss."""
        return loss

    def start(self) -> Start:
        """The logits, and the nodes between them and the loss. Raises LeftAlone."""
        return self.behind_log_softmax() if self.is_nll else Start(self.call_args["input"], {self.node}, [])

    def behind_log_softmax(self) -> Start:
        log_softmax, links = before_upcasts(self.call_args["input"], is_view)
        if name_of(log_softmax) != "log_softmax":
            raise LeftAlone(f"its input is no log_softmax of this graph, but {log_softmax.name}")
        source: Any = input_of(log_softmax)
        before, result = value_of(source), value_of(log_softmax)
        if result.dtype not in (before.dtype, torch.float32) or before.dtype == torch.float64 != result.dtype:
            raise LeftAlone(f"{log_softmax.name} makes {result.dtype} of {before.dtype}")
        upcast = result.dtype != before.dtype or any(value_of(link).dtype != result.dtype for link in links)
        links.reverse()
        views = [link for link in links if is_view(link)]
        dim = arguments_of(log_softmax, ("input", "dim")).get("dim")
        if type(dim) is not int:
            raise LeftAlone(f"{log_softmax.name} names no dimension")
        dim %= max(result.dim(), 1)
        for view in views:
            dim = followed(view, dim)
        if dim != self.class_dim:
            raise LeftAlone(f"the dimension of {log_softmax.name} is not the one of its classes")
        return Start(source, {log_softmax}, [log_softmax, *links], views, upcast)

    @property
    def saves_target(self) -> bool:
        """Does our backward read a target that torch's may not read? F.cross_entropy saves class indices too."""
        return self.is_soft


@dataclass
class Start:
    """Where the walk from a loss to its head starts: the logits that the loss, or its log-softmax, reads."""

    logits: fx.Node
    readers: set[fx.Node]  # they read the logits for the loss: F.cross_entropy itself, or the log-softmax
    behind: list[fx.Node]  # the nodes between the logits and the loss, in order: the log-softmax, its views and casts
    views: list[fx.Node] = field(default_factory=list)  # the views among them
    upcast: bool = False


def losses(graph: fx.Graph) -> Iterator[Loss]:
    """The losses in order."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SIGNATURES:
            yield Loss(node, _SIGNATURES[node.target].bind(*node.args, **node.kwargs).arguments)
        elif node.op == "call_function" and node.target in _OWN:
            names = ("input", *(argument.name for argument in _OWN[1]._schema.arguments[1:]))
            yield Loss(node, dict(zip(names, node.args, strict=False)) | node.kwargs)
