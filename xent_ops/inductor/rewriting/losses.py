"""Finds the losses in a graph: F.cross_entropy, F.nll_loss of a log-softmax (the same loss), and our own.

find_by_hand.py and find_soft.py find losses that a model writes out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .emitter import Emitter
from .links import is_view
from .modes import transformed
from .nodes import LeftAlone, is_cast, name_of, tensor_of, value_of
from .reading import behind
from .region import Region
from .tail import Tail, find

_SIGNATURES = {F.cross_entropy: inspect.signature(F.cross_entropy), F.nll_loss: inspect.signature(F.nll_loss)}
_OWN = (torch.ops.xent.cross_entropy, torch.ops.xent.cross_entropy.default)
_MODULES = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)


@dataclass
class Loss:
    """A call of F.cross_entropy, F.nll_loss or xent_ops.cross_entropy."""

    node: fx.Node
    call_args: dict[str, Any]  # its arguments, by name
    transformed: bool  # is it inside a functorch transform or a level of forward-mode AD?
    why: str = ""  # why it is left alone, if the search shows it already

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
        names = {"nll_loss": self.is_nll, "xent": self.is_own}
        return next((name for name, is_it in names.items() if is_it), "")

    @property
    def remedy(self) -> str:
        """The remedy in the report, if it is left alone."""
        return ""

    def arguments(self, emit: Emitter) -> dict[str, Any]:
        """The arguments of F.cross_entropy."""
        return self.call_args

    def finished(self, emit: Emitter, loss: fx.Node) -> fx.Node:
        """The replacement of the node, computed from our loss."""
        return loss

    def start(self) -> Start:
        """The start of the walk to the head. Raises LeftAlone."""
        return self.behind_log_softmax() if self.is_nll else Start(self.call_args["input"], {self.node}, [])

    def behind_log_softmax(self) -> Start:
        log_softmax, links = _log_softmax(self.node, self.call_args["input"])
        _refuse_log_softmax(log_softmax, links, value_of(self.call_args["input"]), self.class_dim)
        source: Any = log_softmax.args[0] if log_softmax.args else log_softmax.kwargs["input"]
        before, result = value_of(source), value_of(log_softmax)
        if result.dtype not in (before.dtype, torch.float32) or before.dtype == torch.float64 != result.dtype:
            raise LeftAlone(f"{log_softmax.name} makes {result.dtype} of {before.dtype}")
        upcast = result.dtype != before.dtype or any(tensor_of(link).dtype != result.dtype for link in links)
        views = [link for link in links if not is_cast(link)]
        return Start(source, {log_softmax}, [log_softmax, *links], views, upcast)

    @property
    def reads(self) -> list[tuple[str, fx.Node | None]]:
        """The inputs of our operator beside the logits or their head."""
        return [(name, self.call_args.get(name)) for name in ("target", "weight")]

    @property
    def saves_target(self) -> bool:
        """Does our backward read a target that torch's may not read? F.cross_entropy saves class indices too."""
        return self.is_soft

    def tail(self) -> Tail:
        """The nodes before the loss that the operator replaces. Raises LeftAlone."""
        start = self.start()
        tail = find(self.node, start.logits, start.readers)
        tail.views += start.views
        tail.nodes = [*reversed(start.behind), *tail.nodes]
        tail.upcast |= start.upcast
        Region(self.node, tail.nodes, [("logits", tail.source), *self.reads]).refuse()
        return tail


@dataclass
class Start:
    """The first of the nodes before a loss, with its readers."""

    logits: fx.Node
    readers: set[fx.Node]  # the loss, or the log-softmax, ...
    behind: list[fx.Node]  # the casts, and all nodes between them and the loss, in order
    views: list[fx.Node] = field(default_factory=list)  # the views among them
    upcast: bool = False


def losses(graph: fx.Graph) -> Iterator[Loss | fx.Node]:
    """The losses in order. A loss module that Dynamo did not inline is returned as its node."""
    inside = transformed(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SIGNATURES:
            yield Loss(node, _SIGNATURES[node.target].bind(*node.args, **node.kwargs).arguments, node in inside)
        elif node.op == "call_function" and node.target in _OWN:
            names = ("input", *(argument.name for argument in _OWN[1]._schema.arguments[1:]))
            yield Loss(node, dict(zip(names, node.args, strict=False)) | node.kwargs, node in inside)
        elif node.op == "call_module" and isinstance(_module(node), _MODULES):
            yield node


def _module(node: fx.Node) -> torch.nn.Module | None:
    owner = node.graph.owning_module
    return None if owner is None else owner.get_submodule(str(node.target))


def _log_softmax(loss: fx.Node, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """(the node of log_softmax, the views and upcasts from there to the loss, in order)."""
    links: list[fx.Node] = []
    while name_of(node) != "log_softmax":
        source = node.args[0] if node.args else None
        upcast = is_cast(node) and value_of(node).dtype in (torch.float32, value_of(source).dtype)
        if not isinstance(source, fx.Node) or not (upcast or is_view(node)):
            raise LeftAlone("its input is no log_softmax of this graph")
        links.insert(0, node)
        node = source
    return node, links


def _refuse_log_softmax(node: fx.Node, links: list[fx.Node], log_probs: Tensor, classes: int) -> None:
    """Raise LeftAlone unless the log-softmax is over the dimension that is the classes after the views."""
    result: Tensor = value_of(node)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if type(dim) is not int:
        raise LeftAlone(f"{node.name} names no dimension")
    if log_probs.dim() == 0 or result.dim() == 0:
        raise LeftAlone("its input is one number")
    # A probe with stride 1 in this dimension and 0 in the others: the views show where the dimension goes.
    strides = [0] * result.dim()
    strides[dim] = 1
    expected = [0] * log_probs.dim()
    expected[classes] = 1
    try:
        with log_probs.fake_mode:  # type: ignore[attr-defined]
            probe: Any = torch.empty_strided(result.shape, strides, device=result.device)
            for link in links:
                if is_cast(link) or name_of(link) == "contiguous":
                    continue
                probe = _call(link, probe)
        found_strides = [stride if size != 1 else 0 for size, stride in zip(probe.shape, probe.stride(), strict=True)]
        found = probe.shape == log_probs.shape and (found_strides == expected or log_probs.shape[classes] == 1)
    except (RuntimeError, ValueError):  # a view that the probe does not allow
        found = False
    if not found or log_probs.shape[classes] != result.shape[dim]:
        raise LeftAlone(f"the dimension of {node.name} is not the one of its classes")


def _call(node: fx.Node, tensor: Any) -> Any:
    args, kwargs = fx.node.map_arg((node.args[1:], node.kwargs), value_of)
    target: Any = node.target
    return getattr(tensor, target)(*args, **kwargs) if isinstance(target, str) else target(tensor, *args, **kwargs)
