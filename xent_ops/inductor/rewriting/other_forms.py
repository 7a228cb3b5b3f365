"""Finds log-softmaxes over many classes that belong to no known loss. Each gets a line in the report."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, fx

from ...kernels.sizes import statically_true
from .by_hand import GATHERS
from .nodes import is_cast, name_of, value_of, viewed_by
from .reading import arguments_of, behind, input_of, one_dim

MANY = 1024  # classes; a router of experts takes its logsumexp over fewer
_PICKS = (*GATHERS, "index_select")
_SHIFTS = ("add", "clamp", "clamp_min", "clip")  # they avoid a log of zero
_WHY = (
    "{} reads it, and the pass knows the log-probability of one class of each row alone; xent_ops.token_log_probs "
    "computes log-probabilities, logsumexps and entropies, and xent_ops.cross_entropy takes class probabilities"
)


def left(graph: fx.Graph, reported: Collection[fx.Node]) -> Iterator[tuple[fx.Node, str, Any, str]]:
    """(node, its operation, its logits, the reason) of each that is read and not yet in ``reported``."""
    readers = set()  # log-softmaxes with one reader, as in a loop over sequences, share one line
    for node in graph.nodes:
        what, logits, dim = _log_softmax(node)
        value = value_of(logits)
        if node in reported or not node.users or dim is None or not isinstance(value, Tensor) or not value.dim():
            continue
        reader = _reader(node)
        if statically_true(value.shape[dim] >= MANY) and reader not in readers:
            readers.add(reader)
            yield node, what, value, _WHY.format(reader.name)


def _log_softmax(node: fx.Node) -> tuple[str, Any, int | None]:
    """(form, logits, dim of the classes). The dim is None if the node is no log-softmax."""
    name = name_of(node)
    if name in ("log_softmax", "logsumexp"):
        return name, *_operand(node)
    if name == "log":
        source = input_of(node)
        while isinstance(source, fx.Node) and name_of(source := behind(source)) in (*_PICKS, *_SHIFTS):
            source = input_of(source)
        if isinstance(source, fx.Node) and name_of(source) == "softmax":
            return "log of a softmax", *_operand(source)
        exps, dim = _operand(source) if isinstance(source, fx.Node) and name_of(source) == "sum" else (None, None)
        if isinstance(exps, fx.Node) and name_of(exps) == "exp":
            return "log of a sum of exps", input_of(exps), dim
    return "", None, None


def _operand(node: fx.Node) -> tuple[Any, int | None]:
    call_args = arguments_of(node, ("input", "dim"))
    return call_args.get("input"), one_dim(call_args.get("dim"))


def _reader(node: fx.Node) -> fx.Node:
    """The first reader of ``node`` that is no view or cast."""
    reader = next(iter(node.users))
    while reader.users and (is_cast(reader) or viewed_by(reader) is node):
        node, reader = reader, next(iter(reader.users))
    return reader
