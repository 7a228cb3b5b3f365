"""Finds log-probabilities of targets that a model writes out, as DPO, GRPO and contrastive losses read them.

    log_softmax(x).gather(t), x.gather(t) - logsumexp(x)        minus xent::cross_entropy(x, t, reduction="none")

A mask, a mean or a ratio after them stays unchanged. Inductor would scatter the gradient of gather into zeros of the
logits' size, beside that of the log-softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...kernels.sizes import size_hint, statically_equal
from .by_hand import NEVER, ByHand, first_of_arange
from .modes import transformed
from .nodes import name_of, value_of
from .reading import arguments_of, before_upcasts, behind, is_log_softmax, one_dim

GATHERS = {
    "gather": ("input", "dim", "index"),
    "take_along_dim": ("input", "index", "dim"),
    "getitem": ("input", "index"),
}


def losses(graph: fx.Graph) -> Iterator[ByHand]:
    """The losses in order. A loss that cannot be replaced has the reason. A replaced loss may change the next one."""
    inside = transformed(graph)
    for node in list(graph.nodes):
        make = _FINDERS.get(name_of(node) or "")
        if make is not None and (loss := make(node)) is not None:
            loss.transformed = node in inside
            yield loss


def _gathered(node: fx.Node) -> ByHand | None:
    """``log_softmax(x).gather(-1, t[..., None])``, ``log_softmax(x)[torch.arange(len(x)), t]``."""
    input, dim, index, why = _one_a_row(node)
    if input is None or not is_log_softmax(behind(input)):
        return None
    call_args = {"input": input, "target": index, "ignore_index": NEVER, "reduction": "none"}
    return ByHand(node, call_args, False, why, dim, in_brackets=name_of(node) == "getitem")


def _one_a_row(node: fx.Node) -> tuple[Any, int, Any, str]:
    """(input, dim, index, why not) of a gather of one class of each row. The input is None if the node is no gather."""
    call_args = arguments_of(node, GATHERS.get(name_of(node) or "", ()))
    input, dim, index = call_args.get("input"), call_args.get("dim"), call_args.get("index")
    if name_of(node) == "getitem":
        return _in_brackets(input, index)
    logits, indices = value_of(input), value_of(index)
    if not (isinstance(input, fx.Node) and isinstance(logits, Tensor) and isinstance(indices, Tensor)):
        return None, -1, None, ""
    if len(call_args) > 3 or type(dim) is not int:
        return input, -1, index, "it has further arguments, or no dim"
    dim %= max(logits.dim(), 1)
    shape = list(logits.shape)
    if not _equal(indices.shape, [*shape[:dim], 1, *shape[dim + 1 :]]):
        return input, dim, index, "it gathers several classes of a row, or not of each row"
    return input, dim, index, ""


def _in_brackets(input: Any, index: Any) -> tuple[Any, int, Any, str]:
    """The same as ``_one_a_row``, for ``x[rows, t]``."""
    logits, indices = value_of(input), value_of(index[-1]) if isinstance(index, tuple) and len(index) > 1 else None
    if not (isinstance(input, fx.Node) and isinstance(logits, Tensor) and isinstance(indices, Tensor)):
        return None, -1, None, ""
    if indices.is_floating_point() or indices.dtype == torch.bool:
        return None, -1, None, ""
    rows = index[0]
    every = len(index) == logits.dim() == 2 and first_of_arange(rows) == 0
    if (
        not every
        or not statically_equal(value_of(rows).shape, logits.shape[:1])
        or not _equal(indices.shape, logits.shape[:1])
    ):
        return input, 1, index[-1], "its brackets are not [torch.arange(rows), targets]"
    return input, 1, index[-1], ""


def _difference(node: fx.Node) -> ByHand | None:
    """``x.gather(-1, t[..., None]) - x.logsumexp(-1, keepdim=True)``, or the other way round."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(value_of(one), Tensor) for one in node.args):
        return None
    operands: list[Any] = [before_upcasts(one, views=True) for one in node.args]
    negative = name_of(operands[0][0]) in GATHERS
    (picked, views), (total, sums) = operands if negative else operands[::-1]
    logits, total_dim, subtractions = _logsumexp(total)
    if logits is None or name_of(picked) not in GATHERS:
        return None
    input, dim, index, why = _one_a_row(picked)
    if input is None:
        return None
    source, casts = before_upcasts(input)
    if source is not logits:
        if behind(source) is not behind(logits):
            return None
        why = "it reads two views of the logits"
    if not why and (dim != total_dim or not statically_equal(*(value_of(one).shape for one in node.args))):
        why = "the rows of logsumexp are not those of the other operand"
    call_args = {"input": logits, "target": index, "ignore_index": NEVER, "reduction": "none"}
    between = [*views, picked, *casts, *sums, *subtractions]
    in_brackets = name_of(picked) == "getitem"
    return ByHand(node, call_args, False, why, dim, negative, between, True, in_brackets)


def _logsumexp(node: fx.Node) -> tuple[fx.Node | None, int, list[fx.Node]]:
    """(logits, dim, the nodes after them)"""
    call_args = arguments_of(node, ("input", "dim", "keepdim"))
    dim = one_dim(call_args.get("dim"))
    named = name_of(node) == "logsumexp" and call_args.keys() <= {"input", "dim", "keepdim"}
    if not named or dim is None or not isinstance(call_args.get("input"), fx.Node):
        return None, -1, []
    source, casts = before_upcasts(call_args["input"])
    return source, dim % max(value_of(source).dim(), 1), [node, *casts]


_FINDERS = {
    **dict.fromkeys(GATHERS, _gathered),
    **dict.fromkeys(("sub", "subtract"), _difference),
}


def _equal(sizes: Sequence[Any], other_sizes: Sequence[Any]) -> bool:
    """Compare by the hints of symbols. gather takes fewer targets than rows; our operator guards the equality."""
    now, others_now = [size_hint(size) for size in sizes], [size_hint(size) for size in other_sizes]
    return now == others_now and None not in now
