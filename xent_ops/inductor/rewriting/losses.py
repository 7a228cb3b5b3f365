"""Finds the losses in a graph: F.cross_entropy, F.nll_loss of a log-softmax, which is the same, and our own.

For the report, it also finds code that computes the same without these functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from . import heads, writers
from .links import LeftAlone, is_view
from .nodes import is_cast, name_of, tensor_of, value_of, viewed_by
from .tail import Tail, find

_SIGNATURES = {F.cross_entropy: inspect.signature(F.cross_entropy), F.nll_loss: inspect.signature(F.nll_loss)}
_OWN = (torch.ops.xent.cross_entropy, torch.ops.xent.cross_entropy.default)
_MODULES = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
LOG_PROBS = "only F.cross_entropy and F.nll_loss of log_softmax are replaced; see xent_ops.token_log_probs"


@dataclass
class Loss:
    """A call of F.cross_entropy, F.nll_loss, F.linear_cross_entropy or xent_ops.cross_entropy."""

    node: fx.Node
    given: dict[str, Any]  # its arguments, by name
    transformed: bool  # is it inside a functorch transform or a level of forward-mode AD?

    @property
    def is_nll(self) -> bool:
        return self.node.target is F.nll_loss

    @property
    def is_chunked(self) -> bool:
        return heads.chunked(self.node) is not None

    @property
    def is_own(self) -> bool:
        """Is it xent_ops.cross_entropy, which the pass has nothing to do for but to take up its head?"""
        return self.node.target in _OWN

    def start(self) -> Start:
        """Raises LeftAlone."""
        if not self.is_nll:
            return Start(self.given["input"], self.node, [])
        log_softmax, links = _log_softmax(self.node, self.given["input"])
        _refuse_log_softmax(log_softmax, links, value_of(self.given["input"]))
        source: Any = log_softmax.args[0] if log_softmax.args else log_softmax.kwargs["input"]
        before, made = value_of(source), value_of(log_softmax)
        if made.dtype not in (before.dtype, torch.float32) or before.dtype == torch.float64 != made.dtype:
            raise LeftAlone(f"{log_softmax.name} makes {made.dtype} of {before.dtype}")
        if made.requires_grad != before.requires_grad:
            raise LeftAlone(f"{log_softmax.name} was made without gradients")
        graph_inputs = writers.inputs_of(self.node.graph)
        writer = writers.between(log_softmax, self.node, before, graph_inputs, {log_softmax, *links})
        if writer is not None:  # ours would read the logits where the loss stands
            raise LeftAlone(f"{writer.name} may write to the logits between {log_softmax.name} and it")
        upcast = made.dtype != before.dtype or any(tensor_of(link).dtype != made.dtype for link in links)
        return Start(source, log_softmax, [log_softmax, *links], upcast)

    def tail(self) -> Tail:
        """The nodes before the loss that the operator takes up. Raises LeftAlone."""
        start = self.start()
        tail = find(self.node, start.logits, start.reader)
        tail.views += start.views
        tail.nodes = [*reversed(start.behind), *tail.nodes]
        tail.upcast |= start.upcast
        return tail


@dataclass
class Start:
    """Where the nodes before a loss begin."""

    logits: fx.Node
    reader: fx.Node  # the loss, or the log-softmax
    behind: list[fx.Node]  # the log-softmax and the views and casts from there to the loss, in order
    upcast: bool = False

    @property
    def views(self) -> list[fx.Node]:
        return [link for link in self.behind[1:] if not is_cast(link)]


def losses(graph: fx.Graph) -> Iterator[Loss | fx.Node]:
    """The losses in order. A loss module that Dynamo did not inline is returned as its node."""
    depth = 0
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if name.endswith("increment_nesting") or name == "_enter_dual_level":
            depth += 1
        elif name.endswith("decrement_nesting") or name == "_exit_dual_level":
            depth -= 1
        elif node.op == "call_function" and node.target in _SIGNATURES:
            yield Loss(node, _SIGNATURES[node.target].bind(*node.args, **node.kwargs).arguments, depth > 0)
        elif node.op == "call_function" and node.target in _OWN:
            names = ("input", *(argument.name for argument in _OWN[1]._schema.arguments[1:]))
            yield Loss(node, dict(zip(names, node.args, strict=False)) | node.kwargs, depth > 0)
        elif node.op == "call_function" and (given := heads.chunked(node)) is not None:
            yield Loss(node, given, depth > 0)
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
    for one in (node, *links):
        if len(one.users) > 1:
            raise LeftAlone(f"{one.name} has {len(one.users)} uses")
        if tensor_of(one).requires_grad != value_of(node).requires_grad:
            raise LeftAlone(f"{one.name} was made without gradients")
    return node, links


def _refuse_log_softmax(node: fx.Node, links: list[fx.Node], given: Tensor) -> None:
    """Raise LeftAlone unless the log-softmax is over the classes, as seen through the views behind it."""
    made: Tensor = value_of(node)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if type(dim) is not int:
        raise LeftAlone(f"{node.name} names no dimension")
    # A probe with stride 1 in this dimension and 0 in the others: the views show where the dimension goes.
    strides = [0] * made.dim()
    strides[dim] = 1
    classes = 0 if given.dim() == 1 else 1
    wanted = [0] * given.dim()
    wanted[classes] = 1
    try:
        with given.fake_mode:  # type: ignore[attr-defined]
            probe: Any = torch.empty_strided(made.shape, strides, device=made.device)
            for link in links:
                if is_cast(link) or name_of(link) == "contiguous":
                    continue
                probe = _call(link, probe)
        kept = [stride if size != 1 else 0 for size, stride in zip(probe.shape, probe.stride(), strict=True)]
        found = probe.shape == given.shape and (kept == wanted or given.shape[classes] == 1)
    except (RuntimeError, ValueError):  # a view that the probe does not allow
        found = False
    if not found or given.shape[classes] != made.shape[dim]:
        raise LeftAlone(f"the dimension of {node.name} is not the one of its classes")


def _call(node: fx.Node, tensor: Any) -> Any:
    args, kwargs = fx.node.map_arg((node.args[1:], node.kwargs), value_of)
    target: Any = node.target
    return getattr(tensor, target)(*args, **kwargs) if isinstance(target, str) else target(tensor, *args, **kwargs)


def lookalikes(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """(node, description) of log-probabilities of targets that a model gathers by itself."""
    for node in graph.nodes:
        name = name_of(node)
        if name in ("gather", "take_along_dim", "getitem") and _is_gather(node):
            if _named(_behind(node.args[0]), "log_softmax"):
                yield node, "log_softmax, gather"
        elif name in ("sub", "subtract") and len(node.args) == 2:
            both = [_behind(one) for one in node.args]
            gathered = [one for one in both if isinstance(one, fx.Node) and _is_gather(one)]
            sums = [one for one in both if _named(one, "logsumexp")]
            if gathered and sums and _behind(gathered[0].args[0]) is _behind(sums[0].args[0]):
                yield node, "gather, logsumexp"


def _named(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and name_of(node) == name


def _is_gather(node: fx.Node) -> bool:
    name = name_of(node)
    if name == "getitem":  # log_probs[rows, targets]
        index = node.args[1]
        last = value_of(index[-1]) if isinstance(index, tuple) and len(index) > 1 else None
        return isinstance(last, Tensor) and not last.is_floating_point() and last.dtype != torch.bool
    return name in ("gather", "take_along_dim")


def _behind(node: Any) -> Any:
    """The node behind views and casts."""
    while isinstance(node, fx.Node):
        through = viewed_by(node) or (node.args[0] if is_cast(node) else None)
        if through is None:
            break
        node = through
    return node
