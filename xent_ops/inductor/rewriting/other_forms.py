"""Finds log-softmaxes and logsumexps over many classes that belong to no known loss, for a line in the report."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, fx

from ...kernels.sizes import statically_true
from .nodes import is_cast, name_of, value_of, viewed_by
from .reading import arguments_of, one_dim

MANY = 1024  # classes; a router of experts takes its logsumexp over fewer
_WHY = (
    "{} reads it, and the pass knows the log-probability of one class of each row alone; xent_ops.token_log_probs "
    "computes log-probabilities, logsumexps and entropies, and xent_ops.cross_entropy takes class probabilities"
)


def left(graph: fx.Graph, reported: Collection[fx.Node]) -> Iterator[tuple[fx.Node, str, Any, str]]:
    """(node, its operation, its logits, the reason) of each that is read and not yet in ``reported``."""
    readers = set()  # log-softmaxes with one reader, as in a loop over sequences, share one line
    for node in graph.nodes:
        what = name_of(node)
        if what not in ("log_softmax", "logsumexp") or node in reported or not node.users:
            continue
        call_args = arguments_of(node, ("input", "dim"))
        value, dim = value_of(call_args.get("input")), one_dim(call_args.get("dim"))
        if dim is None or not isinstance(value, Tensor) or not value.dim():
            continue
        reader = _reader(node)
        if statically_true(value.shape[dim] >= MANY) and reader not in readers:
            readers.add(reader)
            yield node, what, value, _WHY.format(reader.name)


def _reader(node: fx.Node) -> fx.Node:
    """The first reader of ``node`` that is no view or cast."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.op == "output" or not (is_cast(user) or viewed_by(user) is node):
            return user
        node = user
    return next(iter(node.users))
