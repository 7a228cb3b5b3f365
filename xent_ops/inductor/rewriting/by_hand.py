"""Finds log-probabilities of targets that a model writes out, as DPO, GRPO and contrastive losses read them.

    log_softmax(x).gather(t), x.gather(t) - logsumexp(x)        minus xent::cross_entropy(x, t, reduction="none")

A mask, a mean or a ratio after them stays unchanged. Inductor would scatter the gradient of gather into zeros of the
logits' size, beside that of the log-softmax.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...kernels.sizes import size_hint, statically_equal, statically_true
from . import writers
from .emitter import Emitter
from .losses import Loss, Start
from .nodes import LeftAlone, is_cast, name_of, position, share_memory, value_of
from .reading import arguments_of, before_upcasts, behind, keeps_order, one_dim

GATHERS = {
    "gather": ("input", "dim", "index"),
    "take_along_dim": ("input", "index", "dim"),
    "getitem": ("input", "index"),
}
# gather ignores no target. So this ignore_index is no class, no result of a cast of NaN or infinity, and no usual mark.
# A target out of range stays an error or NaN.
NEVER = -(2**63) // 3


@dataclass
class ByHand(Loss):
    """The node is the log-probability of the target of each row, or minus that."""

    dim: int = -1  # the dimension of the classes
    negative: bool = True  # the node is minus the loss
    # If call_args["input"] is the logits, all nodes from there to this one. If it is their log-softmax, none.
    between: list[fx.Node] = field(default_factory=list)

    remedy = "; xent_ops.token_log_probs computes them"
    is_soft = False
    saves_target = True  # take_along_dim saves a copy of it

    @property
    def nodes(self) -> set[fx.Node]:
        return {*super().nodes, *self.between}

    @property
    def class_dim(self) -> int:
        return self.dim

    @property
    def title(self) -> str:
        return "gather, logsumexp" if self.between else "log_softmax, gather"

    def start(self) -> Start:
        logits, order = self.call_args["input"], position(self.node.graph)
        if self.between:
            readers = {node for node in self.between if logits in node.all_input_nodes}
            start = Start(logits, readers, sorted({*self.between}, key=lambda node: order[node]))
        else:
            start = self.behind_log_softmax()
        source: Tensor = value_of(start.logits)
        for node in start.behind:
            result = value_of(node)
            if isinstance(result, Tensor) and result.dtype not in (source.dtype, torch.float32):
                raise LeftAlone(f"{node.name} has dtype {result.dtype}, and the logits {source.dtype}")
        start.upcast |= any(is_cast(node) and value_of(node).dtype != source.dtype for node in start.behind)
        return start

    def arguments(self, emit: Emitter) -> dict[str, Any]:
        target = self.call_args["target"]
        if value_of(target).dim() == value_of(self.call_args["input"]).dim():
            target = emit("squeeze", target, self.dim)
        elif _first_of_arange(target, -1) < 0:  # in brackets, where a negative target counts from the end
            above = emit(operator.add, target, emit.size(self.call_args["input"], self.dim))
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
        sizes = [size if isinstance(size, int) else -1 for size in expected.shape]
        if sizes.count(-1) > 1 or (-1 in sizes and 0 in sizes):
            raise LeftAlone(f"{self.node.name} has several sizes that change")
        return emit("reshape", loss, tuple(sizes))


def losses(graph: fx.Graph) -> Iterator[ByHand]:
    """The losses in order. A loss that cannot be replaced has the reason. A replaced loss may change the next one."""
    for node in list(graph.nodes):
        name = name_of(node)
        loss = _gathered(node) if name in GATHERS else _difference(node) if name in ("sub", "subtract") else None
        if loss is not None:
            yield loss


def _gathered(node: fx.Node) -> ByHand | None:
    """``log_softmax(x).gather(-1, t[..., None])``, ``log_softmax(x)[torch.arange(len(x)), t]``."""
    found = _one_a_row(node)
    if found is None or name_of(behind(found.input)) != "log_softmax":
        return None
    return ByHand(node, _call_args(found.input, found.index), found.why, found.dim)


def _call_args(input: fx.Node, index: fx.Node) -> dict[str, Any]:
    return {"input": input, "target": index, "ignore_index": NEVER, "reduction": "none"}


@dataclass
class _Gather:
    """A gather of one class of each row."""

    input: fx.Node
    dim: int  # the dimension of the classes
    index: fx.Node
    why: str = ""  # why it is not that


def _one_a_row(node: fx.Node) -> _Gather | None:
    call_args = arguments_of(node, GATHERS[name_of(node) or ""])
    index: Any = call_args.get("index")
    input, dim = call_args.get("input"), call_args.get("dim")
    if name_of(node) == "getitem":
        return _in_brackets(input, index)
    logits, indices = value_of(input), value_of(index)
    if not (isinstance(input, fx.Node) and isinstance(logits, Tensor) and isinstance(indices, Tensor)):
        return None
    if len(call_args) > 3 or type(dim) is not int:
        return _Gather(input, -1, index, "it has further arguments, or no dim")
    dim %= max(logits.dim(), 1)
    every = _equal(indices.shape, (*logits.shape[:dim], 1, *logits.shape[dim + 1 :]))
    return _Gather(input, dim, index, "" if every else "it gathers several classes of a row, or not of each row")


def _in_brackets(input: Any, index: Any) -> _Gather | None:
    """``x[rows, t]``."""
    logits, indices = value_of(input), value_of(index[-1]) if isinstance(index, tuple) and len(index) == 2 else None
    if not (isinstance(logits, Tensor) and isinstance(indices, Tensor)):
        return None
    if indices.dtype not in (torch.int64, torch.int32):  # others are masks
        return None
    rows, index = index
    every = logits.dim() == 2 and _first_of_arange(rows) == 0
    every = every and statically_equal(value_of(rows).shape, logits.shape[:1])
    every = every and _equal(indices.shape, logits.shape[:1])
    return _Gather(input, 1, index, "" if every else "its brackets are not [torch.arange(rows), targets]")


def _difference(node: fx.Node) -> ByHand | None:
    """``x.gather(-1, t[..., None]) - x.logsumexp(-1, keepdim=True)``, or the other way round."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(value_of(one), Tensor) for one in node.args):
        return None
    operands: list[Any] = [before_upcasts(one, keeps_order) for one in node.args]
    negative = name_of(operands[0][0]) in GATHERS
    (picked, views), (total, sums) = operands if negative else operands[::-1]
    if name_of(picked) not in GATHERS or name_of(total) != "logsumexp":
        return None
    found, total_args = _one_a_row(picked), arguments_of(total, ("input", "dim", "keepdim"))
    total_dim = one_dim(total_args.get("dim"))
    if found is None or total_dim is None:
        return None
    source, casts = before_upcasts(found.input)
    logits, other_casts = before_upcasts(total_args["input"])
    why = found.why
    if source is not logits:
        if behind(source) is not behind(logits):
            return None
        why = "it reads two views of the logits"
    total_dim %= max(value_of(logits).dim(), 1)
    if not why and (found.dim != total_dim or not statically_equal(*(value_of(one).shape for one in node.args))):
        why = "the rows of logsumexp are not those of the other operand"
    between = [*views, picked, *casts, *sums, total, *other_casts]
    return ByHand(node, _call_args(logits, found.index), why, found.dim, negative, between)


def _equal(sizes: Sequence[Any], other_sizes: Sequence[Any]) -> bool:
    """Compare by the hints of symbols. gather takes fewer targets than rows; our operator guards the equality."""
    now, others_now = [size_hint(size) for size in sizes], [size_hint(size) for size in other_sizes]
    return now == others_now and None not in now


def _first_of_arange(node: Any, otherwise: int | None = None) -> Any:
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
