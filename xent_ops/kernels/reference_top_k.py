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

_OVER = 1e-3  # probabilities may add up to 1 + _OVER


def most(probs: Tensor) -> float:
    """The largest sum of probabilities. Each is rounded, and so is the sum that they were divided by: twice eps / 2."""
    return 1.0 + max(_OVER, torch.finfo(probs.dtype).eps)


def _is_first(ids: Tensor) -> Tensor:
    """(..., K): no earlier place of the row has the same id. A sort: comparing all pairs would take K times as much."""
    values, order = ids.sort(dim=-1, stable=True)
    first = torch.ones_like(ids, dtype=torch.bool)
    return first.scatter(-1, order[..., 1:], values[..., 1:] != values[..., :-1])


def top_k_distillation(
    at_ids: Tensor,
    lse: Tensor,
    ids: Tensor,
    probs: Tensor,
    token_weight: Tensor | None = None,
    tail: bool = False,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses (...), their derivatives by at_ids (..., K), and by lse (...)), 0 in rows whose ids are all ignored.

    Probabilities that add up to less than 0, or with a tail to more than ``most``, give NaN.
    """
    counted, dtype = is_counted(ids, options.ignore_index), at_ids.dtype
    row_counted, lse = counted.any(-1), lse.to(dtype)
    probs_of_ids = torch.where(counted, probs.to(dtype), 0.0)
    total = probs_of_ids.sum(-1, keepdim=True)
    wrong = total != total.clamp(0.0, most(probs) if tail else None)
    if tail:
        rest = torch.where(row_counted.unsqueeze(-1), (1.0 - total).clamp(min=0.0), 0.0)
        probs_of_ids = torch.cat([probs_of_ids, rest], -1)
    weighted, z_factor = torch.where(wrong, float("nan"), probs_of_ids), row_counted.to(dtype)
    if token_weight is not None:
        z_factor = torch.where(row_counted, token_weight.to(dtype), 0.0)
        weighted = times(weighted, z_factor.unsqueeze(-1))
    z_factor = lse_square_scale * z_factor
    if not tail:
        log_probs = at_ids - lse.unsqueeze(-1)
    else:
        # If no other class is left, o is -inf, and so would be log q_r: the remainder is left out.
        rest = torch.where(lse == float("-inf"), 0.0, weighted[..., -1])
        weighted = torch.cat([weighted[..., :-1], rest.unsqueeze(-1)], -1)
        x = torch.cat([at_ids, lse.unsqueeze(-1)], -1)
        first = torch.nn.functional.pad(counted & _is_first(ids), (0, 1), value=True)
        different = torch.where(first, x, float("-inf"))
        # Not torch.logsumexp: it guards on the number of rows, which may depend on data.
        shift = different.amax(-1, keepdim=True)
        shares = torch.exp(different - shift)
        sum_of_shares = shares.sum(-1, keepdim=True)
        log_sum = sum_of_shares.log()
        log_probs, softmax, lse = x - shift - log_sum, shares / sum_of_shares, (shift + log_sum).squeeze(-1)
    loss = -torch.where(weighted == 0.0, 0.0, weighted * log_probs).sum(-1)  # 0 log 0 is 0
    total = weighted.sum(-1)
    if lse_square_scale != 0.0:
        loss, total = loss + times(lse.square(), z_factor), total + times(2 * lse, z_factor)
    if not tail:
        return loss, -weighted, total
    grads = times(softmax, total.unsqueeze(-1)) - weighted  # a row of weight 0 gets no gradient, even if q is NaN
    return loss, grads[..., :-1].contiguous(), grads[..., -1].contiguous()
