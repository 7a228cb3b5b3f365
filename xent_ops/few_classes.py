"""Cross entropy with the probabilities of a few classes a row, a teacher's top k: as a function of tokens.

With q the softmax, ids the classes that a row names and p_k their probabilities:

    loss = -sum_k p_k log q_k  -  tail (1 - sum_k p_k) log(1 - sum of q over the ids)

Without a tail the loss is not least at q = p where the probabilities add up to less than one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .head import float16, loop
from .head.loop import HeadSlice
from .kernels.options import LossOptions
from .kernels.reductions import counted_weights
from .kernels.reference import accumulator, is_counted
from .kernels.reference_ids import first_counted
from .ops import arguments, checks, transforms
from .ops.token_logits import at_least_one_class
from .outputs import TokenLogProbs, log_probs_of_ids
from .token_function import Function, divided

_ops = torch.ops.xent
_OVER = 1e-3  # how far above one probabilities may add up


def checked(
    ids: Tensor,
    rows: int,
    target_probs: Any,
    tail: Any,
    weight: Tensor | None,
    loss: LossOptions,
    token_weight: Tensor | None,
) -> None:
    """Raises where a call cannot be one with probabilities of few classes. ``rows``: how many dimensions rows have."""
    arguments.boolean("tail", tail)
    arguments.required("target_probs", target_probs)
    if ids.is_floating_point():
        raise TypeError(f"target has dtype {ids.dtype}; with target_probs it holds class indices (..., K)")
    if ids.dim() != rows + 1:
        raise ValueError(
            f"target has shape {tuple(ids.shape)}; with target_probs it has {rows + 1} dimensions, (..., K): K classes "
            "of each row"
        )
    checks.dtype("target_probs", target_probs, checks.FLOATS)
    if not transforms.is_jit_traced():
        at_least_one_class(ids)
        checks.same_shape("target_probs", target_probs.shape, ids.shape, "a probability for each class of the target")
    checks.same_device("target_probs", target_probs, ids, "target is")
    if target_probs.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("target_probs requires grad, and the loss has no derivative for it: detach it")
    if weight is not None:
        raise ValueError("weight is for one target a row: multiply target_probs by the classes' weights instead")
    if loss.rows.label_smoothing != 0.0:
        raise ValueError("label_smoothing is for one target a row: smooth target_probs instead")
    checks.token_weight(token_weight, ids[..., 0])
    if target_probs.device.type == "cpu" and not transforms.is_traced():  # elsewhere: probabilities
        checks.refuse_log_probabilities("target_probs", _of_counted(ids, target_probs, loss.rows.ignore_index))


def without_probs(tail: Any) -> None:
    """Raises where a call without target_probs cannot have this tail."""
    if arguments.boolean("tail", tail):
        raise ValueError("tail=True is for target_probs, whose remainder it is: pass these, or leave it out")


def _of_counted(ids: Tensor, target_probs: Tensor, ignore_index: int) -> Tensor:
    return torch.where(is_counted(ids, ignore_index), target_probs, 0.0)


def probabilities(ids: Tensor, target_probs: Tensor, ignore_index: int) -> Tensor:
    """(..., K): 0 of ignored ids; NaN in a row that adds up to less than 0, as log-probabilities do."""
    probs = _of_counted(ids, target_probs, ignore_index)
    return torch.where(probs.sum(-1, keepdim=True) < 0.0, float("nan"), probs)


def as_function(
    input: Tensor,
    ids: Tensor,
    target_probs: Tensor,
    tail: bool,
    loss: LossOptions,
    divisor: Any,
    token_weight: Tensor | None,
) -> tuple[Function, tuple[Tensor, ...], Any]:
    """(fn, rows, divisor) of ``linear_token_loss``."""
    ignore_index = loss.rows.ignore_index
    rows = [probabilities(ids, target_probs, ignore_index)]
    if tail:
        rows.append(is_counted(ids, ignore_index) & _is_first(ids))
    if token_weight is not None:
        rows.append(token_weight)
    if loss.reduction == "mean":
        divisor = divisor_of_mean(input, ids, token_weight, ignore_index)
    return _function(tail, loss.lse_square_scale, token_weight is not None), tuple(rows), divisor


def in_one_visit(
    input: Tensor,
    head: HeadSlice,
    ids: Tensor,
    rows: tuple[Tensor, ...],
    fn: Function,
    loss: LossOptions,
    divisor: Tensor | None,
    token_weight: Tensor | None,
) -> Tensor:
    """A mean or a sum without a tail, whose derivatives are known before the statistics. ``rows``: as_function's."""
    if divisor is not None and divisor.requires_grad:
        checks.divisor_needs_grad()
    dtype, ignore_index = accumulator(input), loss.rows.ignore_index
    target = first_counted(ids, ignore_index)
    counted = is_counted(target, ignore_index)
    divisors = torch.ones((), dtype=dtype, device=input.device) if divisor is None else divisor.to(dtype)
    within, later = float16.split_divisors(input.dtype, divisors.expand(2), target, token_weight, loss=loss)
    factor = counted.to(dtype)
    if token_weight is not None:
        factor = counted_weights(token_weight, target, ignore_index, dtype)
    factor = factor / within[0]
    square = None if loss.lse_square_scale == 0.0 else loss.lse_square_scale * factor
    at_ids, lse, *made = _ops.linear_token_logits_with_grad(
        input.detach(),
        head.weight.detach(),
        ids,
        -rows[0].to(dtype) * factor.unsqueeze(-1),
        square,
        None if head.bias is None else head.bias.detach(),
        loop.wanted_gradients(input, head),
        head.accumulate_dtype,
        **head.chunking.keywords(),
        **loss.rows.keywords(),
    )
    log_probs = log_probs_of_ids(at_ids, lse, ids, ignore_index)
    values = torch.where(counted, fn(TokenLogProbs(log_probs, lse, torch.where(counted, lse, 0.0)), *rows), 0.0)
    return loop.value(divided(values, divisor), input, head, loop.Gradients(*made), later)


def divisor_of_mean(input: Tensor, ids: Tensor, token_weight: Tensor | None, ignore_index: int) -> Tensor:
    """(): the number of counted rows, or the sum of their weights."""
    target, dtype = first_counted(ids, ignore_index), accumulator(input)
    if token_weight is None:
        return is_counted(target, ignore_index).sum().to(dtype)
    return counted_weights(token_weight, target, ignore_index, dtype).sum()


def _is_first(ids: Tensor) -> Tensor:
    """(..., K): no earlier place of the row has the same id. By sorting: to compare all pairs takes K times as much."""
    values, order = ids.to(torch.int64).sort(dim=-1, stable=True)
    first = torch.cat([torch.ones_like(values[..., :1], dtype=torch.bool), values[..., 1:] != values[..., :-1]], -1)
    return torch.empty_like(first).scatter(-1, order, first)


def _function(tail: bool, lse_square_scale: float, weighted: bool) -> Function:
    def fn(stats: TokenLogProbs, probs: Tensor, *rest: Tensor) -> Tensor:
        log_q = stats.log_probs
        # Each is rounded, and their sum where they were divided by it: twice half of eps.
        over = max(_OVER, torch.finfo(probs.dtype).eps)
        probs = probs.to(log_q.dtype)
        loss = -torch.where(probs == 0.0, 0.0, probs * log_q).sum(-1)  # 0 log 0 is 0
        if tail:
            mass = probs.sum(-1)
            left = torch.where(mass > 1.0 + over, float("nan"), (1.0 - mass).clamp(min=0.0))
            named = torch.where(rest[0], log_q.exp(), 0.0).sum(-1)
            # What is not named has at least the probability that float32 tells from zero.
            others = torch.log((1.0 - named).clamp(min=torch.finfo(log_q.dtype).eps))
            loss = loss - torch.where(left == 0.0, 0.0, left * others)
        if lse_square_scale != 0.0:
            loss = loss + lse_square_scale * stats.lse.square()
        if not weighted:
            return loss
        token_weight = rest[-1].to(loss.dtype)
        return torch.where(token_weight == 0.0, 0.0, token_weight * loss)

    return fn
