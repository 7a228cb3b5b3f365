"""A log-probability that a model writes out, without F.cross_entropy. Our operator's loss of rows replaces it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...kernels.sizes import statically_equal, statically_true
from . import writers
from .emitter import Emitter
from .losses import Loss, Start
from .nodes import LeftAlone, is_cast, name_of, position, share_memory, value_of

# gather ignores no target. So this ignore_index is no class, no result of a cast of NaN or infinity, and no usual mark.
# A target out of range stays an error or NaN.
NEVER = -(2**63) // 3


@dataclass
class ByHand(Loss):
    """The node is the log-probability of the target of each row, or minus that."""

    dim: int = -1  # the dimension of the classes
    negative: bool = True  # the node is minus the loss
    between: list[fx.Node] = field(default_factory=list)  # all nodes from call_args["input"] to this one
    reads_logits: bool = False  # call_args["input"] is the logits, not their log-softmax
    in_brackets: bool = False  # a negative target counts from the end

    @property
    def nodes(self) -> set[fx.Node]:
        return {*super().nodes, *self.between}

    @property
    def class_dim(self) -> int:
        return self.dim

    @property
    def is_soft(self) -> bool:
        return False

    @property
    def title(self) -> str:
        return "gather, logsumexp" if self.reads_logits else "log_softmax, gather"

    @property
    def remedy(self) -> str:
        return "; xent_ops.token_log_probs computes them"

    def start(self) -> Start:
        order = position(self.node.graph)
        logits: fx.Node = self.call_args["input"]
        if self.reads_logits:
            start = Start(logits, {node for node in self.between if logits in node.all_input_nodes}, [])
        else:
            start = self.behind_log_softmax()
        start.behind = sorted({*start.behind, *self.between}, key=lambda node: order[node])
        source: Tensor = value_of(start.logits)
        for node in start.behind:
            result = value_of(node)
            if isinstance(result, Tensor) and result.dtype not in (source.dtype, torch.float32):
                raise LeftAlone(f"{node.name} has dtype {result.dtype}, and the logits {source.dtype}")
        start.upcast |= any(is_cast(node) and value_of(node).dtype != source.dtype for node in start.behind)
        return start

    @property
    def saves_target(self) -> bool:
        return True  # take_along_dim saves a copy of it

    def arguments(self, emit: Emitter) -> dict[str, Any]:
        target, logits = self.call_args["target"], value_of(self.call_args["input"])
        if value_of(target).dim() == logits.dim():
            target = emit("squeeze", target, self.dim)
        elif self.in_brackets and first_of_arange(target, -1) < 0:
            classes: Any = logits.shape[self.dim]
            if not isinstance(classes, int):
                classes = emit("size", self.call_args["input"], self.dim)
            above = emit(operator.add, target, classes)
            target = emit(torch.where, emit(operator.lt, target, 0), above, target)
        return {**self.call_args, "target": target}

    def finished(self, emit: Emitter, loss: fx.Node) -> fx.Node:
        """The sign and the shape of the node, from the loss of each row."""
        expected, rows = value_of(self.node), value_of(loss)
        if self.negative:
            loss = emit("neg", loss)
        if statically_equal(expected.shape, rows.shape):
            return loss
        if expected.dim() == rows.dim() + 1 and statically_true(expected.shape[self.dim] == 1):
            return emit("unsqueeze", loss, self.dim)
        # The sizes of a fake tensor may be symbols, and a graph takes nodes.
        sizes = [size if isinstance(size, int) else -1 for size in expected.shape]
        if sizes.count(-1) > 1 or (-1 in sizes and 0 in sizes):
            raise LeftAlone(f"{self.node.name} has several sizes that change")
        return emit("reshape", loss, tuple(sizes))


def first_of_arange(node: Any, otherwise: int | None = None) -> Any:
    """The first number of a ``torch.arange`` with step 1 that nothing writes to."""
    if not isinstance(node, fx.Node) or name_of(node) != "arange" or value_of(node).dtype != torch.int64:
        return otherwise
    several = len(node.args) + ("end" in node.kwargs) > 1
    start = node.kwargs.get("start", node.args[0] if several else 0)
    step = node.kwargs.get("step", node.args[2] if len(node.args) > 2 else 1)
    if type(start) is not int or step != 1 or len(node.args) > 3:
        return otherwise
    written = (one for other in node.graph.nodes for one in writers.written_by(other))
    return otherwise if any(share_memory(value_of(one), value_of(node)) for one in written) else start
