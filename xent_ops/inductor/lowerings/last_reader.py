"""Finds the backward operators that are the last readers of their logits' memory. reuse.py lowers these in place.

This is decided in the joint graph, where forward and backward are still one graph. The inputs of a backward graph do
not tell: two slices of one product may be saved separately, AOTAutograd calls both donated, and the fake tensors of
recomputed views do not share a storage. The answer becomes part of the node's name, because the partitioner and the
keys of Inductor's caches keep names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse

from ..._private import unless_gone
from ...kernels.sizes import size_hint
from ...ops import overwriting

MARK = "last_reader"

aten, prims = torch.ops.aten, torch.ops.prims

# Their schemas promise new memory, but it may be shared. The first is a view. Inductor removes the next three where
# they change nothing. It computes the inputs of the last two inside the memory of the result.
MAY_BE_VIEWS = {
    aten._unsafe_view.default,
    aten.clone.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
}

SIZES = {aten.sym_size.int, aten.sym_stride.int}  # they do not read the tensor's memory
_NO_READERS = {operator.getitem, aten._unsafe_view.default, *SIZES}

# They use the size of their argument and not its values.
_LIKE = {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, *SIZES}

# AOTAutograd's tags for nodes traced in the backward, or for writes of a Function's backward.
_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


class MarkLastReaders:
    """A pass over the joint graph, with the interface of a PatternMatcherPass. Passes that change nodes run before."""

    def __init__(self, positions: dict[Any, int]) -> None:
        self.positions = positions  # operator -> position of its logits

    @unless_gone("the mark of last readers", "a compiled loss takes a second buffer of logits", lambda *_: 0)
    def apply(self, graph: fx.Graph) -> int:
        if not self._candidates(graph):
            return 0
        # Also in the graph for the partitioner: it merges equal computations, and they then share memory.
        names = self._last_readers(graph) & self._last_readers(fx_graph_cse(graph))
        marked = [node for node in self._candidates(graph) if node.name in names]
        for node in marked:
            node._rename(f"{node.name}_{MARK}")
        return len(marked)

    def _candidates(self, graph: fx.Graph) -> list[fx.Node]:
        return [node for node in graph.nodes if node.op == "call_function" and node.target in self.positions]

    def _last_readers(self, graph: fx.Graph) -> set[str]:
        memory, backward = _memory_of(graph), _backward(graph)
        return {
            node.name
            for node in self._candidates(graph)
            if _reads_last(node, self.positions[node.target], memory, backward)
        }


def _backward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of the backward, without recomputed ones.

    They include nodes that do not depend on upstream gradients (tangents): a Function's backward may ignore its
    upstream gradient, or write saved values to a buffer.
    """
    starts = [node for node in graph.nodes if node.meta.get("partitioner_tag") in _BACKWARD_TAGS]
    starts += [node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name]
    return {node for node in reached(starts) if node.op != "output"} | _gradients(graph.output_node())


def _gradients(output: fx.Node) -> set[fx.Node]:
    """The gradients among a joint graph's outputs, by AOTAutograd's descriptions; all outputs if there are none."""
    returned = torch.utils._pytree.arg_tree_leaves(*output.args)
    descriptions = output.meta.get("desc") or []
    if len(descriptions) == len(returned):
        pairs = zip(returned, descriptions, strict=True)
        returned = [node for node, description in pairs if description is None or description.is_grad()]
    return {node for node in returned if isinstance(node, fx.Node)}


def _reads_last(node: fx.Node, position: int, memory: dict[fx.Node, list[fx.Node]], backward: set[fx.Node]) -> bool:
    """Does nothing in the backward need the logits' memory after ``node`` has read it?

    What other nodes compute from that memory must be an input of ``node``, or stay in the forward. Their results count,
    not only the nodes that read: the partitioner may compute a read again in the backward, and Inductor copies a
    pointwise operator into each of its users.
    """
    logits = node.args[position]
    if not isinstance(logits, fx.Node) or _rows_overlap(logits):
        return False
    aliases = memory[logits]
    if any(alias.op != "call_function" for alias in aliases):  # an input of the graph
        return False
    if [argument for argument in node.args if argument in aliases] != [logits]:
        return False
    before = reached([node], lambda step: () if step.target in _LIKE else step.all_input_nodes)
    readers = {reader for alias in aliases for reader in alias.users if not _reads_nothing(reader)} - {node}
    # The forward saves their results for the backward (save.py): they do not run again.
    readers -= {reader for reader in readers - backward if _functionalized(reader)}
    if any(reader.op == "output" for reader in readers):
        return False
    return (reached(list(readers), lambda step: () if step is node else step.users) & backward) <= before


def _rows_overlap(logits: fx.Node) -> bool:
    """Do rows overlap at the traced sizes? The kernel checks other sizes."""
    value = logits.meta["val"]
    sizes, strides = ([size_hint(size) for size in numbers] for numbers in (value.shape, value.stride()))
    return None in (*sizes, *strides) or overwriting.may_overlap(sizes, strides)


def _memory_of(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the nodes that may share memory with it, including itself."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        group = [node]
        for source in _shared(node):
            if groups.get(source, group) is not group:
                group = groups[source] + group
                for member in group:
                    groups[member] = group
        groups[node] = group
    return groups


def _shared(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node may return."""
    if node.op != "call_function":
        return []
    sources = [source for source in node.all_input_nodes if not isinstance(source.meta.get("val"), _NUMBERS)]
    if node.target is operator.getitem:
        producer: Any = node.args[0]
        if _functionalized(producer):
            # The operator's results, then the tensors it wrote to. They share no memory with its inputs.
            index: Any = node.args[1]
            position, bases = index - max(1, len(producer.args[0]._schema.returns)), producer.kwargs["_all_bases"]
            return [user for user in producer.users if user.args == node.args] + (
                [bases[position]] if position >= 0 else []
            )
        # The results of our operators share no memory with each other; one may be taken out several times.
        ours = getattr(producer.target, "namespace", "") == "xent"
        return [user for user in producer.users if user.args == node.args] if ours else sources
    if _functionalized(node):
        return []  # a tuple
    if not isinstance(node.target, torch._ops.OpOverload):
        return sources  # a higher-order operator may return any of its arguments
    if node.target in MAY_BE_VIEWS:
        return [source for source in sources if _dtype(source) == _dtype(node)]
    returns_new_memory = all(result.alias_info is None for result in node.target._schema.returns)
    return [] if returns_new_memory else sources


def _functionalized(node: fx.Node) -> bool:
    """Is it an operator of ours that writes to tensors, in its functional form?"""
    is_functionalized = node.target is torch.ops.higher_order.auto_functionalized_v2
    return is_functionalized and getattr(node.args[0], "namespace", "") == "xent"


def _reads_nothing(node: fx.Node) -> bool:
    """Is it a view, or a query of the size?"""
    if node.op != "call_function":
        return False
    if node.target in _NO_READERS:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def reached(
    start: list[fx.Node], steps: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.users
) -> set[fx.Node]:
    """``start`` and all nodes that ``steps`` reaches from it: users by default, inputs with ``all_input_nodes``."""
    found, waiting = set(start), list(start)
    while waiting:
        for node in steps(waiting.pop()):
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found
