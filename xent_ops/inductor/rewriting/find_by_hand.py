"""Finds losses that a model writes out: log-probabilities of targets, as DPO, GRPO and contrastive losses read them,
and the cross entropy of soft targets.

    log_softmax(x).gather(t)                                    minus xent::cross_entropy(x, t, reduction="none")
    x.gather(t) - logsumexp(x), x.diagonal() - logsumexp(x)     the same
    sum(log_softmax(x) * p)                                     minus xent::soft_cross_entropy_forward(x, p)

A mask, a mean or a ratio behind them stays as it is. Inductor would scatter the gradient of gather into zeros of the
logits' size, beside that of the log-softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...kernels.sizes import known, known_equal
from . import find_soft
from .by_hand import DIAGONAL, GATHER, NEVER, SUM, ByHand, first_of_arange
from .modes import transformed
from .nodes import name_of, parts_of, share_memory, value_of
from .reading import arguments_of, before_upcasts, behind, input_of, is_log_softmax, one_dim, softmax_dim

GATHERS = {
    "gather": ("input", "dim", "index"),
    "take_along_dim": ("input", "index", "dim"),
    "getitem": ("input", "index"),
}
_PICKS = {*GATHERS, "diagonal", "diag"}


def losses(graph: fx.Graph) -> Iterator[ByHand]:
    """The losses in order, those that cannot be replaced with the reason. One that is replaced may change the next."""
    inside, nodes = transformed(graph), list(graph.nodes)
    stacks = [loss for node in nodes if name_of(node) == "stack" and (loss := _stacked_gathers(node)) is not None]
    parts = {node for loss in stacks for node in loss.between}
    for node in nodes:
        make = _FINDERS.get(name_of(node) or "") if node not in parts else None
        if make is not None and (loss := make(node)) is not None:
            loss.transformed = node in inside
            yield loss


def _gathered(node: fx.Node) -> ByHand | None:
    """``log_softmax(x).gather(-1, t[..., None])``, ``log_softmax(x)[torch.arange(len(x)), t]``."""
    input, dim, index, why = _one_a_row(node)
    if input is None or not is_log_softmax(behind(input)):
        return None
    given = {"input": input, "target": index, "ignore_index": NEVER, "reduction": "none"}
    return ByHand(node, given, False, why, GATHER, dim, in_brackets=name_of(node) == "getitem")


def _one_a_row(node: fx.Node) -> tuple[Any, int, Any, str]:
    """(input, dim, index, why not) of a gather of one class of each row. The input is None where it is no gather."""
    given = arguments_of(node, GATHERS.get(name_of(node) or "", ()))
    input, dim, index = given.get("input"), given.get("dim"), given.get("index")
    if name_of(node) == "getitem":
        return _in_brackets(input, index)
    logits, indices = value_of(input), value_of(index)
    if not (isinstance(input, fx.Node) and isinstance(logits, Tensor) and isinstance(indices, Tensor)):
        return None, -1, None, ""
    if len(given) > 3 or type(dim) is not int:
        return input, -1, index, "it has further arguments, or no dim"
    dim %= max(logits.dim(), 1)
    shape = list(logits.shape)
    if not _equal(indices.shape, [*shape[:dim], 1, *shape[dim + 1 :]]):
        return input, dim, index, "it gathers several classes of a row, or not of each row"
    return input, dim, index, ""


def _in_brackets(input: Any, index: Any) -> tuple[Any, int, Any, str]:
    """The same of ``x[rows, t]``."""
    logits, indices = value_of(input), value_of(index[-1]) if isinstance(index, tuple) and len(index) > 1 else None
    if not (isinstance(input, fx.Node) and isinstance(logits, Tensor) and isinstance(indices, Tensor)):
        return None, -1, None, ""
    if indices.is_floating_point() or indices.dtype == torch.bool:
        return None, -1, None, ""
    rows = index[0]
    every = len(index) == logits.dim() == 2 and first_of_arange(rows) == 0
    if (
        not every
        or not known_equal(value_of(rows).shape, logits.shape[:1])
        or not _equal(indices.shape, logits.shape[:1])
    ):
        return input, 1, index[-1], "its brackets are not [torch.arange(rows), targets]"
    return input, 1, index[-1], ""


def _difference(node: fx.Node) -> ByHand | None:
    """``x.gather(-1, t[..., None]) - x.logsumexp(-1, keepdim=True)``, or the other way round."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(value_of(one), Tensor) for one in node.args):
        return None
    operands: list[Any] = [before_upcasts(one, views=True) for one in node.args]
    negative = name_of(operands[0][0]) in _PICKS
    (picked, views), (total, sums) = operands if negative else operands[::-1]
    logits, total_dim, rest = _logsumexp(total)
    if logits is None or name_of(picked) not in _PICKS:
        return None
    what, dim, index, why = SUM, total_dim, None, ""
    if name_of(picked) in GATHERS:
        input, dim, index, why = _one_a_row(picked)
    else:
        what, input = DIAGONAL, input_of(picked)
        if value_of(logits).dim() != 2 or picked.kwargs or picked.args[1:] not in ((), (0,), (0, 0, 1), (0, -2, -1)):
            return None
    if input is None:
        return None
    source, casts = before_upcasts(input)
    if source is not logits:
        if behind(source) is not behind(logits):
            return None
        why = "it reads two views of the logits"
    if not why and (dim != total_dim or not known_equal(*(value_of(one).shape for one in node.args))):
        why = "the rows of logsumexp are not those of the other operand"
    given = {"input": logits, "target": index, "ignore_index": NEVER, "reduction": "none"}
    between = [*views, picked, *casts, *sums, *rest]
    in_brackets = name_of(picked) == "getitem"
    return ByHand(node, given, False, why, what, dim, negative, between, True, in_brackets)


def _logsumexp(node: fx.Node) -> tuple[fx.Node | None, int, list[fx.Node]]:
    """(logits, dim, the nodes behind them), of ``torch.stack([x.logsumexp(-1) for x in logits])`` too."""
    if (parts := _stacked(node)) is not None:
        found = [_logsumexp(part) for part in parts]
        logits, nodes = _whole([input for input, *_ in found])
        dims = {dim for _, dim, _ in found}
        if len(dims) != 1:
            return None, -1, []
        logits, casts = (None, []) if logits is None else before_upcasts(logits)
        return logits, dims.pop() + 1, [node, *nodes, *casts, *(one for *_, rest in found for one in rest)]
    given = arguments_of(node, ("input", "dim", "keepdim"))
    dim = one_dim(given.get("dim"))
    named = name_of(node) == "logsumexp" and given.keys() <= {"input", "dim", "keepdim"}
    if not named or dim is None or not isinstance(given.get("input"), fx.Node):
        return None, -1, []
    source, casts = before_upcasts(given["input"])
    return source, dim % max(value_of(source).dim(), 1), [node, *casts]


def _stacked_gathers(node: fx.Node) -> ByHand | None:
    """``torch.stack([x.log_softmax(-1).gather(-1, t) for x, t in zip(logits, target)])``, as TRL has it."""
    between, inputs, targets = [], [], []
    dims: set[int] = set()
    for part in _stacked(node) or ():
        picked, views = before_upcasts(part, views=True)
        log_probs, dim, index, why = _one_a_row(picked)
        if why or not is_log_softmax(log_probs) or softmax_dim(log_probs) not in (dim, dim - value_of(log_probs).dim()):
            return None
        source, casts = before_upcasts(input_of(log_probs))
        inputs.append(source)
        row = before_upcasts(index, views=True)[0]
        if not share_memory(value_of(row), value_of(index)):  # a copy, which sees no writes
            return None
        targets.append(row)
        between += [*views, picked, log_probs, *casts]
        dims.add(dim + 1)
    logits, rows = _whole(inputs)
    target, _ = _whole(targets)
    if logits is None or target is None or len(dims) != 1:
        return None
    dim = dims.pop()
    sizes, wanted = list(value_of(logits).shape), value_of(target).shape
    del sizes[dim]
    if not _equal(wanted, sizes) and not _equal(wanted, [*sizes[:dim], 1, *sizes[dim:]]):
        return None
    given = {"input": logits, "target": target, "ignore_index": NEVER, "reduction": "none"}
    return ByHand(node, given, False, "", GATHER, dim, True, [*between, *rows], True)


def _stacked(node: fx.Node) -> list[fx.Node] | None:
    """What ``torch.stack`` puts side by side along a new first dimension."""
    given = arguments_of(node, ("tensors", "dim"))
    parts: Any = given.get("tensors")
    if name_of(node) != "stack" or not given.keys() <= {"tensors", "dim"} or given.get("dim", 0) != 0:
        return None
    found = list(parts) if isinstance(parts, (list, tuple)) else []
    return found if found and all(isinstance(part, fx.Node) for part in found) else None


def _whole(parts: list[Any]) -> tuple[fx.Node | None, list[fx.Node]]:
    """(the tensor whose first dimension these nodes take apart in order, these and what makes them)."""
    found: list[Any] = []
    nodes: list[fx.Node] = []
    for place, part in enumerate(parts):
        if part is None or name_of(part) != "getitem" or type(part.args[1]) is not int or part.args[1] != place:
            return None, []
        source = parts_of(part)
        if source is None:
            found.append(part.args[0])
            nodes.append(part)
        elif name_of(source) == "unbind" and not source.kwargs and source.args[1:] in ((), (0,)):
            found.append(source.args[0])
            nodes += [part, source]
        else:
            return None, []
    value = value_of(found[0]) if found and all(one is found[0] for one in found) else None
    return (found[0], nodes) if isinstance(value, Tensor) and known(value.shape[0] == len(found)) else (None, [])


_FINDERS = {
    **dict.fromkeys(GATHERS, _gathered),
    **dict.fromkeys(("sub", "subtract"), _difference),
    "stack": _stacked_gathers,
    "sum": find_soft.loss_of,
}


def _equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """For what symbols stand for now. gather takes fewer targets than rows; our operator guards that they are equal."""
    pairs = list(zip(sizes, others, strict=False))
    now = [one.node.hint if isinstance(one, torch.SymInt) else one for pair in pairs for one in pair]
    return len(sizes) == len(others) and None not in now and now[::2] == now[1::2]
