"""What is switched on at each node of a Dynamo graph: autocast, inference mode, gradients, transforms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

_ENTER = {"_enter_autocast", "_enter_inference_mode"}
_EXIT = {"_exit_autocast", "_exit_inference_mode"}


class Modes(NamedTuple):
    contexts: tuple[fx.Node, ...]  # the open ones of autocast and inference mode
    gradients: bool  # are they recorded?
    transformed: bool  # is it inside a functorch transform or a level of forward-mode AD?


def modes(graph: fx.Graph) -> dict[fx.Node, Modes]:
    """The modes of each node. A graph starts with the gradient mode in which its pass runs."""
    found: dict[fx.Node, Modes] = {}
    contexts: tuple[fx.Node, ...] = ()
    gradients, transforms = torch.is_grad_enabled(), 0
    before: list[bool] = []  # the gradient modes outside of the open inference modes
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name in _ENTER:
            contexts = (*contexts, node)
        elif name in _EXIT:
            contexts = tuple(one for one in contexts if one is not node.args[0])
        if node.target is torch._C._set_grad_enabled:
            gradients = bool(node.args[0])
        elif name == "_enter_inference_mode":
            before.append(gradients)
            gradients = not node.args[0]
        elif name == "_exit_inference_mode":
            gradients = before.pop()
        elif name.endswith("increment_nesting") or name == "_enter_dual_level":
            transforms += 1
        elif name.endswith("decrement_nesting") or name == "_exit_dual_level":
            transforms -= 1
        found[node] = Modes(contexts, gradients, transforms > 0)
    return found
