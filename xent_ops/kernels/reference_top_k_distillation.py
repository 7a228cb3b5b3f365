"""The loss of a row that learns the probabilities of a few classes, a teacher's top k, and its derivatives.

q is the softmax of the student, ids are the classes of a row, p_k are their probabilities, and r is the remainder:

    loss = -sum_k p_k log q_k                  without a tail
    loss = -sum_k p_k log q_k - r log q_r      with it: r = 1 - sum_k p_k, and q_r belongs to all other classes

With a tail the operators give x of the ids and o, the lse of all other classes (``mask_ids``). L is the lse of all::

    L = log(exp(o) + sum of exp(x_k) over different ids);  log q_k = x_k - L;  log q_r = o - L
    m = sum_k p_k + r;  d loss / d x_k = m q_k - p_k;  d loss / d o = m q_r - r

The first of equal ids has m q_k, and each has its own p_k. Without a tail L is known: its derivative is m, that of x_k
is -p_k. A z-loss s L^2 adds 2 s L to m. The weight of a token multiplies p_k, r and s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .options import DEFAULTS, RowOptions
from .reductions import times
from .reference import is_counted

# Teachers are stored in bfloat16 and read as float32. A probability is rounded, and so is the sum that it was divided
# by: twice eps / 2. If log p was rounded, p is off by a factor exp(|log p| eps / 2) at most.
_EPS = torch.finfo(torch.bfloat16).eps
MOST, MOST_PER_NAT = 1.0 + _EPS, _EPS / 2


def most(p: Tensor) -> Tensor:
    """(...): the largest sum of probabilities (..., K) that rounding to bfloat16 explains."""
    return MOST - MOST_PER_NAT * torch.where(p > 0.0, p * p.log(), 0.0).sum(-1)


def _is_first(ids: Tensor) -> Tensor:
    """(..., K): no earlier place of the row has the same id. A sort: comparing all pairs would take K times as much."""
    # Keys that differ: a stable sort is no core aten.
    number = ids.shape[-1]
    order = (ids.to(torch.int64) * number + torch.arange(number, device=ids.device)).sort(dim=-1).indices
    values, first = ids.gather(-1, order), torch.ones_like(ids, dtype=torch.bool)
    return first.scatter(-1, order[..., 1:], values[..., 1:] != values[..., :-1])


def top_k_distillation(
    at_ids: Tensor,
    lse: Tensor,
    ids: Tensor,
    probs: Tensor,
    token_weight: Tensor | None = None,
    tail: bool = False,
    lse_low: Tensor | None = None,  # what the rounding of the lse took: 0 for None
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses (...), their derivatives by at_ids (..., K), and by lse (...)), 0 in rows whose ids are all ignored.

    Probabilities that add up to less than 0, or with a tail to more than ``most``, give NaN.
    """
    counted, dtype = is_counted(ids, options.ignore_index), at_ids.dtype
    row_counted, lse, factors = counted.any(-1), lse.to(dtype), None
    low = torch.zeros_like(lse) if lse_low is None else lse_low.to(dtype)
    p = torch.where(counted, probs.to(dtype), 0.0)
    total = p.sum(-1)
    wrong = ~((total >= 0.0) & (total <= most(p))) if tail else ~(total >= 0.0)  # NaN is wrong
    p = torch.where(wrong.unsqueeze(-1), float("nan"), p)
    if token_weight is not None:
        factors = torch.where(row_counted, token_weight.to(dtype), 0.0)
        p = times(p, factors.unsqueeze(-1))
    if not tail:
        log_p = (at_ids - lse.unsqueeze(-1)) - low.unsqueeze(-1)
        loss, total = -_products(p, log_p).sum(-1), p.sum(-1)
    else:
        # If no other class is left, o is -inf, and so would be log q_r: the remainder is left out.
        rest = torch.where(row_counted & (lse != float("-inf")), times((1.0 - total).clamp(min=0.0), factors), 0.0)
        different = torch.where(counted & _is_first(ids), at_ids, float("-inf"))
        # Not torch.logsumexp: it guards on the number of rows, which may depend on data.
        shift = torch.maximum(different.amax(-1), lse)
        log_rest = (lse - shift) + low
        share, share_of_rest = torch.exp(different - shift.unsqueeze(-1)), torch.exp(log_rest)
        sum_of_shares = share.sum(-1) + share_of_rest
        log_sum = sum_of_shares.log()
        log_p, log_rest = at_ids - shift.unsqueeze(-1) - log_sum.unsqueeze(-1), log_rest - log_sum
        loss, total = -_products(p, log_p).sum(-1) - _products(rest, log_rest), p.sum(-1) + rest
        lse = shift + log_sum
    if lse_square_scale != 0.0:
        z_factor = lse_square_scale * (row_counted.to(dtype) if factors is None else factors)
        loss, total = loss + times(lse.square(), z_factor), total + times(2 * lse, z_factor)
    if not tail:
        return loss, -p, total
    # A row of weight 0 gets no gradient, even if q is NaN.
    grad_ids = times(share / sum_of_shares.unsqueeze(-1), total.unsqueeze(-1)) - p
    return loss, grad_ids, times(share_of_rest / sum_of_shares, total) - rest


def _products(p: Tensor, log_q: Tensor) -> Tensor:
    """0 log 0 is 0."""
    return torch.where(p == 0.0, 0.0, p * log_q)
