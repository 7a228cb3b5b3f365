"""The autocast and inference modes of each node of a Dynamo graph.

Gradient mode is left out: it shows in ``requires_grad`` of the fake tensors.
"""

from __future__ import annotations

from torch import fx

_ENTER = {"_enter_autocast", "_enter_inference_mode"}
_EXIT = {"_exit_autocast", "_exit_inference_mode"}


def modes(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """The open contexts of each node. Nodes with the same contexts run in the same modes."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    contexts: tuple[fx.Node, ...] = ()
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name in _ENTER:
            contexts = (*contexts, node)
        elif name in _EXIT:
            contexts = tuple(one for one in contexts if one is not node.args[0])
        found[node] = contexts
    return found
