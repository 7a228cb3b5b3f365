"""The autocast and inference modes of each node of a Dynamo graph, and whether gradients are recorded there."""

from __future__ import annotations

from typing import Any

import torch
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


def gradient_modes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Are gradients recorded at each node? A graph starts in the mode in which its pass runs."""
    found: dict[fx.Node, bool] = {}
    enabled = torch.is_grad_enabled()
    before: list[bool] = []  # outside of the open inference modes
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif name == "_enter_inference_mode":
            before.append(enabled)
            enabled = not node.args[0]
        elif name == "_exit_inference_mode":
            enabled = before.pop()
        found[node] = enabled
    return found


def transformed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes inside of a functorch transform or a level of forward-mode AD."""
    found: set[fx.Node] = set()
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name.endswith("increment_nesting") or name == "_enter_dual_level":
            depth += 1
        elif name.endswith("decrement_nesting") or name == "_exit_dual_level":
            depth -= 1
        elif depth > 0:
            found.add(node)
    return found


def autocasts(node: fx.Node) -> list[tuple[Any, ...]]:
    """The arguments of torch.autocast, of the open contexts of a node."""
    contexts = modes(node.graph)[node]
    return [one.args for one in contexts if one.target is torch.amp.autocast_mode._enter_autocast]
