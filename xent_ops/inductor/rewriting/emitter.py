"""Adds nodes to a Dynamo graph, each with its fake tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .modes import modes
from .nodes import value_of


class Emitter:
    """Adds nodes in front of the loss."""

    def __init__(self, loss: fx.Node) -> None:
        self.loss = loss
        self.emitted: list[fx.Node] = []
        self.fake_mode = value_of(loss).fake_mode
        self.contexts = modes(loss.graph)[loss].contexts
        self.meta: dict[str, Any] = {
            key: loss.meta[key]
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "mutation_region_id")
            if key in loss.meta
        }

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Enter the fake mode, and the autocast that the loss runs in."""
        with contextlib.ExitStack() as stack:
            # Our composite operator creates constants, which need the fake mode. torch calls the innermost of nested
            # hooks. So these hooks keep fake tensors from the user's hooks.
            stack.enter_context(self.fake_mode)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged))
            for context in self.contexts:
                if context.target is torch.amp.autocast_mode._enter_autocast:
                    args: Any = context.args
                    stack.enter_context(torch.autocast(*args))
            yield

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        values = fx.node.map_arg((args, kwargs), value_of)
        with self.modes():
            if isinstance(target, str):
                value = getattr(values[0][0], target)(*values[0][1:], **values[1])
            else:
                value = target(*values[0], **values[1])
        with self.loss.graph.inserting_before(self.loss):
            make = self.loss.graph.call_method if isinstance(target, str) else self.loss.graph.call_function
            node = make(target, args, kwargs)
        node.meta = {**self.meta, "example_value": value}
        self.emitted.append(node)
        return node

    def size(self, tensor: fx.Node, dim: int) -> Any:
        """The size, as a number or a node. The sizes of a fake tensor may be symbols, which a graph cannot hold."""
        size = value_of(tensor).shape[dim]
        return size if isinstance(size, int) else self("size", tensor, dim)

    def undo(self) -> None:
        for node in reversed(self.emitted):
            node.graph.erase_node(node)


def _unchanged(tensor: Any) -> Any:
    return tensor
