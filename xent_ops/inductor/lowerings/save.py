"""Lets the partitioner save the gradients of a linear loss, even if it recomputes everything else.

The forward computes them in three products. A checkpoint, a memory budget or aggressive recomputation would repeat that
in the backward: six products, where row losses take four. A formula of the operator's flops does not prevent it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from ..._private import unless_gone
from ...ops.library import OPERATORS
from .last_reader import reached

_SMALLEST_BUDGET = 1e-6
_REGION = "_region_activation_memory_budget"  # torch.autograd.graph.region_activation_memory_budget, of torch 2.13


def _results(call: fx.Node) -> tuple[fx.Node, ...]:
    return (call, *call.users)  # the users are getitem nodes, one for each result


def _gradients(call: fx.Node) -> list[fx.Node]:
    """A call of ``attach_gradients``, the gradients it carries, and the nodes that these are views or results of.

    The partitioner recomputes views and single results in spite of their marks, so their sources need a mark too.
    """
    result_nodes = [call]
    node: Any
    bound = OPERATORS["attach_gradients"].bind(*call.args)
    for node in (bound.grad_input, bound.grad_linear_weight, bound.grad_linear_bias):
        while getattr(node.target, "is_view", False):
            result_nodes.append(node)
            node = node.args[0]
        result_nodes += _results(node.args[0]) if node.target is operator.getitem else [node]
    return result_nodes


_MARKED: dict[Any, Callable[[fx.Node], Iterable[fx.Node]]] = {
    torch.ops.xent.linear_cross_entropy_with_grad.default: _results,
    torch.ops.xent.linear_divergences_with_grad.default: _results,
    torch.ops.xent.attach_gradients.default: _gradients,
}


class SaveGradients:
    """Marks the results of these calls in the joint graph, before it is partitioned, as a PatternMatcherPass would."""

    @unless_gone("the mark of made gradients", "a checkpoint or a memory budget makes them twice", lambda *_: 0)
    def apply(self, graph: fx.Graph) -> int:
        from torch.utils.checkpoint import CheckpointPolicy

        calls = [call for op in _MARKED for call in graph.find_nodes(op="call_function", target=op)]
        # The budget of a region overrides the budget that _heed_marks sets.
        if not calls or any(_REGION in (node.meta.get("custom") or {}) for node in graph.nodes):
            return 0
        _heed_marks(calls)
        for call in calls:
            for node in _MARKED[call.target](call):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return 0


def _heed_marks(calls: list[fx.Node]) -> None:
    """Change a memory budget with which torch 2.13 would not obey the marks.

    With a budget of 0 it ignores all marks. If it finds nothing else to recompute, it saves the marked node itself, a
    tuple, and Inductor refuses that; a budget gains nothing in that graph.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import get_default_op_list

    budget = config.activation_memory_budget
    if budget == 1.0:
        return
    before = reached(calls, lambda node: node.all_input_nodes)
    has_intensive = any(map(get_default_op_list().is_compute_intensive, before))
    # The partitioner takes any node's budget as the graph's.
    calls[0].meta["memory_budget"] = max(budget, _SMALLEST_BUDGET) if has_intensive else 1.0
