"""Finds the cross entropy of soft targets that a model writes out: sum(log_softmax(x) * p) is minus that."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ...kernels.sizes import statically_equal
from .by_hand import SOFT, ByHand
from .nodes import name_of, value_of, viewed_by
from .reading import arguments_of, behind, input_of, is_log_softmax, is_negated, one_dim, softmax_dim
from .tail import is_fused


def loss_of(node: fx.Node) -> ByHand | None:
    """The loss ``torch.sum(-p * F.log_softmax(x, -1), dim=-1)``, or its sum without a dim."""
    call_args = arguments_of(node, ("input", "dim", "keepdim"))
    product, negative = call_args.pop("input", None), True
    between: list[fx.Node] = []
    if is_negated(product):
        between.append(product)
        product, negative = product.args[0], False
    if not isinstance(product, fx.Node) or name_of(product) not in ("mul", "multiply"):
        return None
    if len(product.args) != 2 or product.kwargs:
        return None
    operands: list[Any] = list(product.args)
    is_log_probs = [is_log_softmax(behind(one)) for one in operands]
    if sum(is_log_probs) != 1 or not isinstance(value_of(operands[is_log_probs.index(False)]), Tensor):
        return None
    log_probs, target = operands if is_log_probs[0] else operands[::-1]
    between.append(product)
    if is_negated(target) and len(target.users) == 1:  # another user may write to it
        between.append(target)
        target, negative = target.args[0], not negative
    own = (behind(log_probs), input_of(behind(log_probs)))
    if name_of(target) in ("exp", "softmax") and behind(input_of(target)) in own:  # an entropy
        return None
    why, dim = _why_not(log_probs, target, call_args)
    taken = {"input": log_probs, "target": target, "reduction": "none"}
    return ByHand(node, taken, False, why, SOFT, dim, negative, between)


def _why_not(log_probs: fx.Node, target: fx.Node, call_args: dict[str, Any]) -> tuple[str, int]:
    """(why not, dim of the classes)."""
    logits, probs = value_of(log_probs), value_of(target)
    dim = one_dim(call_args.get("dim"))
    if call_args.get("dim") is None and is_log_softmax(log_probs):
        dim = softmax_dim(log_probs)
    if not call_args.keys() <= {"dim", "keepdim"} or dim is None:
        return "it sums over something other than the classes, or all", -1
    dim %= max(logits.dim(), 1)
    if not probs.is_floating_point():
        return f"its target has dtype {probs.dtype}", dim
    if not statically_equal(logits.shape, probs.shape):
        return "its target has another shape than the logits", dim
    if probs.requires_grad:
        return "its target requires grad, and has a gradient of the logits' size", dim
    node: fx.Node | None = target
    while node is not None:
        if is_fused(node) or name_of(node) in ("softmax", "log_softmax"):
            return f"its target is made by {node.name}, which Inductor fuses with it", dim
        node = viewed_by(node)
    return "", dim
