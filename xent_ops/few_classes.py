"""Cross entropy with probabilities for a few classes per row, such as a teacher's top k, as a function of tokens.

q is the softmax, ids are the classes of a row, and p_k are their probabilities:

    loss = -sum_k p_k log q_k  -  tail (1 - sum_k p_k) log(1 - sum of q over the ids)

Without a tail, and with probabilities that add up to less than one, the minimum of the loss is not at q = p.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .head import float16, loop
from .kernels.reductions import counted_weights
from .kernels.reference import accumulator, is_counted
from .kernels.reference_ids import first_counted
from .linear_call import LinearCall, cross_entropy, statistics
from .ops import arguments, checks, transforms
from .ops.linear import composite
from .ops.token_logits import at_least_one_class
from .outputs import TokenLogProbs
from .token_function import Function, TokenFunction, divided, loss_of_head

_ops = torch.ops.xent
_OVER = 1e-3  # probabilities may add up to 1 + _OVER


def bind(call: LinearCall, target_probs: Any, tail: Any) -> LinearCall:
    """The call, with probabilities (..., K) for the classes of its target."""
    arguments.boolean("tail", tail)
    arguments.required("target_probs", target_probs)
    ids, rows = call.target, call.input.dim() - 1
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
    if call.head.class_weight is not None:
        raise ValueError("weight is for one target a row: multiply target_probs by the classes' weights instead")
    if call.loss.row_options.label_smoothing != 0.0:
        raise ValueError("label_smoothing is for one target a row: smooth target_probs instead")
    checks.token_weight(call.token_weight, ids[..., 0])
    ignore_index = call.loss.row_options.ignore_index
    if target_probs.device.type == "cpu" and not transforms.is_traced():  # not while tracing: it reads values
        checks.refuse_log_probabilities("target_probs", _counted_probs(ids, target_probs, ignore_index))
    return call._replace(target=first_counted(ids, ignore_index), ids=ids, target_probs=target_probs, tail=tail)


def without_probs(tail: Any) -> None:
    """Refuse ``tail`` in a call without target_probs."""
    if arguments.boolean("tail", tail):
        raise ValueError("tail=True is for target_probs, whose remainder it is: pass these, or leave it out")


def _counted_probs(ids: Tensor, target_probs: Tensor, ignore_index: int) -> Tensor:
    return torch.where(is_counted(ids, ignore_index), target_probs, 0.0)


def probabilities(ids: Tensor, target_probs: Tensor, ignore_index: int) -> Tensor:
    """(..., K): 0 for ignored ids. NaN in a row with a sum below 0, which is typical of log-probabilities."""
    probs = _counted_probs(ids, target_probs, ignore_index)
    return torch.where(probs.sum(-1, keepdim=True) < 0.0, float("nan"), probs)


def loss(call: LinearCall) -> Tensor:
    """The loss of a call from ``bind``, for plain tensors."""
    ignore_index, reduction = call.loss.row_options.ignore_index, call.loss.reduction
    call = call.in_autocast_dtype()
    assert call.ids is not None and call.target_probs is not None
    if call.ids.shape[-1] == 1 and not call.tail and call.loss.lse_square_scale == 0.0:  # one class with a weight
        factor = probabilities(call.ids, call.target_probs, ignore_index)[..., 0]
        if call.token_weight is not None:
            factor = factor * call.token_weight
        return cross_entropy(call.as_sum()._replace(target=call.ids[..., 0], token_weight=factor))
    scale = call.loss.lse_square_scale
    call, function = as_token_loss(call)
    if reduction == "none":
        values = function.all_values(*statistics(call, function.reads_entropy, function.mask_ids), call.target)
        return values.view(call.target.shape)
    if not call.tail and composite.gradients_in_forward(call.input, call.head.weight, call.head.bias):
        return _in_one_visit(call, function, scale)
    return loss_of_head(call, function)


def as_token_loss(call: LinearCall) -> tuple[LinearCall, TokenFunction]:
    """The call as a sum of a function of tokens. The function applies the z-loss and the token weights."""
    assert call.ids is not None and call.target_probs is not None
    ids, ignore_index, scale = call.ids, call.loss.row_options.ignore_index, call.loss.lse_square_scale
    rows = [probabilities(ids, call.target_probs, ignore_index)]
    if call.tail:
        rows.append(is_counted(ids, ignore_index) & _is_first(ids))
    if call.token_weight is not None:
        rows.append(call.token_weight)
    fn = _function(call.tail, scale, call.token_weight is not None)
    function = TokenFunction(fn, rows, call.target, ignore_index, accumulator(call.input), ids, mask_ids=call.tail)
    return call._replace(loss=call.loss._replace(lse_square_scale=0.0)).as_sum(), function


def _in_one_visit(call: LinearCall, function: TokenFunction, lse_square_scale: float) -> Tensor:
    """A mean or a sum without a tail in one pass: its derivatives do not depend on the statistics."""
    head, dtype, ignore_index = call.head, accumulator(call.input), call.loss.row_options.ignore_index
    target, divisor, token_weight = call.target, call.divisor, call.token_weight
    if divisor is not None and divisor.requires_grad:
        checks.divisor_needs_grad()
    divisors = torch.ones((), dtype=dtype, device=call.input.device) if divisor is None else divisor.to(dtype)
    loss = call.loss._replace(lse_square_scale=lse_square_scale)
    split = float16.split_loss(call.input.dtype, divisors.expand(2), target, token_weight, loss=loss)
    factor = is_counted(target, ignore_index).to(dtype)
    if split.token_weight is not None:
        factor = counted_weights(split.token_weight, target, ignore_index, dtype)
    factor = factor / split.divisors[0]
    at_ids, lse, *grads = _ops.linear_token_logits_with_grad(
        call.input.detach(),
        head.weight.detach(),
        call.ids,
        -function.rows[0].to(dtype) * factor.unsqueeze(-1),
        None if lse_square_scale == 0.0 else lse_square_scale * factor,
        None if head.bias is None else head.bias.detach(),
        loop.wanted_gradients(call.input, head),
        head.accumulate_dtype,
        split.shares,
        **head.chunking.keywords(),
        **call.loss.row_options.keywords(),
    )
    values = function.all_values(at_ids, lse, lse, target)
    return loop.value(divided(values, divisor), call.input, head, loop.Gradients(*grads), split)


def _is_first(ids: Tensor) -> Tensor:
    """(..., K): no earlier place of the row has the same id. A sort: comparing all pairs would take K times as much."""
    values, order = ids.to(torch.int64).sort(dim=-1, stable=True)
    first = torch.cat([torch.ones_like(values[..., :1], dtype=torch.bool), values[..., 1:] != values[..., :-1]], -1)
    return torch.empty_like(first).scatter(-1, order, first)


def _function(tail: bool, lse_square_scale: float, weighted: bool) -> Function:
    def fn(stats: TokenLogProbs, probs: Tensor, *optional_rows: Tensor) -> Tensor:
        log_q, lse = stats.log_probs, stats.lse
        if tail:  # x of the ids, and the lse of all other classes
            # Not torch.logsumexp: it guards on the number of tokens, which may depend on data.
            other_lse, is_first_id = lse.unsqueeze(-1), optional_rows[0]
            shift = torch.where(is_first_id, log_q, other_lse).amax(-1, keepdim=True).detach()
            total = torch.where(is_first_id, log_q - shift, float("-inf")).exp().sum(-1, keepdim=True)
            lse = (shift + torch.log(total + torch.exp(other_lse - shift))).squeeze(-1)
            log_q = log_q - lse.unsqueeze(-1)
        # Each probability is rounded, and so is their sum if they were divided by it: twice half of eps.
        over = max(_OVER, torch.finfo(probs.dtype).eps)
        probs = probs.to(log_q.dtype)
        loss = -torch.where(probs == 0.0, 0.0, probs * log_q).sum(-1)  # 0 log 0 is 0
        if tail:
            mass = probs.sum(-1)
            tail_mass = torch.where(mass > 1.0 + over, float("nan"), (1.0 - mass).clamp(min=0.0))
            # If no class remains, use the least positive number of the dtype as probability.
            log_tail = (stats.lse - lse).clamp(min=math.log(torch.finfo(lse.dtype).tiny))
            loss = loss - torch.where(tail_mass == 0.0, 0.0, tail_mass * log_tail)
        if lse_square_scale != 0.0:
            loss = loss + lse_square_scale * lse.square()
        if not weighted:
            return loss
        token_weight = optional_rows[-1].to(loss.dtype)
        return torch.where(token_weight == 0.0, 0.0, token_weight * loss)

    return fn
