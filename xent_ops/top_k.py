"""Losses that learn the probabilities of a few classes per row, a teacher's top k, from logits or from hidden states.

q is the softmax of the student, ids are the classes of a row, p_k are their probabilities, and r is the remainder:

    loss = -sum_k p_k log q_k                  without a tail
    loss = -sum_k p_k log q_k - r log q_r      with it: r = 1 - sum_k p_k, and q_r belongs to all other classes

With a tail the operators give x of the ids and o, the lse of all other classes (``mask_ids``). L is the lse of all::

    L = log(exp(o) + sum of exp(x_k) over different ids);  log q_k = x_k - L;  log q_r = o - L
    m = sum_k p_k + r;  d loss / d x_k = m q_k - p_k;  d loss / d o = m q_r - r

The first of equal ids has m q_k, and each has its own p_k. Without a tail L is known: its derivative is m, that of x_k
is -p_k. A z-loss s L^2 adds 2 s L to m. Weights of tokens multiply p_k, r and s once, before the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .head.loop import RowGradients, RowRange
from .head.shard import RowStatistics
from .kernels.options import Reduction
from .kernels.reductions import counted_weights, times
from .kernels.reference import accumulator, is_counted
from .linear_call import LinearCall, bind, refuse_call, rows_counted, statistics
from .ops import arguments, checks, transforms
from .ops.dtensors import refuse_dtensors
from .ops.linear import checks as linear_checks
from .ops.token_logits import target_and_ids
from .token_function import TokenRows, Values, loss_of_head

_ops = torch.ops.xent
_OVER = 1e-3  # probabilities may add up to 1 + _OVER


class TopK(TokenRows):
    """The loss of each row, from x of its ids and an lse, and its derivatives.

    Its rows are p_k and with a tail r, then which ids have no equal before them, then the factor of the z-loss.
    """

    def __init__(
        self,
        target: Tensor,
        ids: Tensor,
        probs: Tensor,
        tail: bool,
        token_weight: Tensor | None,
        lse_square_scale: float,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> None:
        self.mask_ids, self.has_z_loss = tail, lse_square_scale != 0.0
        counted, factors = is_counted(ids, ignore_index), None
        values = torch.where(counted, probs.detach().to(dtype), 0.0)
        total = values.sum(-1, keepdim=True)
        wrong = total != total.clamp(0.0, _most(probs) if tail else None)
        if tail:
            rest = torch.where(counted.any(-1, keepdim=True), (1.0 - total).clamp(min=0.0), 0.0)
            values = torch.cat([values, rest], -1)
        values = torch.where(wrong, float("nan"), values)
        if token_weight is not None:
            factors = counted_weights(token_weight.detach(), target, ignore_index, dtype)
            values = times(values, factors.unsqueeze(-1))
        rows = [values]
        if tail:
            rows.append(torch.nn.functional.pad(counted & _is_first(ids), (0, 1), value=True))
        if self.has_z_loss:
            rows.append(lse_square_scale * (is_counted(target, ignore_index).to(dtype) if factors is None else factors))
        super().__init__(rows, target, ignore_index, dtype, ids)

    def upstream_of_parts(self, parts: int, divisor: Tensor, values: Values) -> Callable[..., RowGradients]:
        rows = self._rows(parts, self.number // parts)

        def upstream(statistics: RowStatistics, part: RowRange) -> RowGradients:
            loss, probs, softmax, lse, z_factor = self._losses(
                statistics.at_ids, statistics.lse, [part.of(row) for row in rows]
            )
            values.append((loss, part.target))
            total = probs.sum(-1)
            if z_factor is not None:
                total = total + times(2 * lse, z_factor)
            if softmax is None:
                grad_ids, grad_lse = -probs / divisor, total / divisor
            else:  # a row of weight 0 gets no gradient, even if its softmax is NaN
                grads = (times(softmax, total.unsqueeze(-1)) - probs) / divisor
                grad_ids, grad_lse = grads[:, :-1], grads[:, -1]
            return RowGradients(grad_lse.new_zeros(()), grad_lse, grad_ids=grad_ids)

        return upstream

    def all_values(self, loss_or_at_ids: Tensor, lse: Tensor, entropy: Tensor, target: Tensor) -> Tensor:
        rows, counted = self._rows(self.number), is_counted(target, self.ignore_index).reshape(-1)
        lse = torch.where(counted, lse.reshape(-1), 0.0)  # that of a row that was not computed is infinite
        return self._losses(loss_or_at_ids.reshape(rows[-1].shape), lse, rows)[0]

    def _losses(
        self, at_ids: Tensor | None, lse: Tensor, rows: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """(losses, p and r, q with a tail, L, the factor of the z-loss) of n rows."""
        assert at_ids is not None
        probs, softmax, z_factor = rows[0], None, rows[-2] if self.has_z_loss else None
        if not self.mask_ids:
            log_probs = at_ids - lse.unsqueeze(-1)
        else:
            # If no other class is left, o is -inf, and so would be log q_r: the remainder is left out.
            rest = torch.where(lse == float("-inf"), 0.0, probs[:, -1])
            probs = torch.cat([probs[:, :-1], rest.unsqueeze(-1)], -1)
            x = torch.cat([at_ids, lse.unsqueeze(-1)], -1)
            different = torch.where(rows[1], x, float("-inf"))
            # Not torch.logsumexp: it guards on the number of rows, which may depend on data.
            shift = different.amax(-1, keepdim=True).detach()
            shares = torch.exp(different - shift)
            total = shares.sum(-1, keepdim=True)
            log_total = total.log()
            log_probs, softmax, lse = x - shift - log_total, shares / total, (shift + log_total).squeeze(-1)
        loss = -torch.where(probs == 0.0, 0.0, probs * log_probs).sum(-1)  # 0 log 0 is 0
        if z_factor is not None:
            loss = loss + times(lse.square(), z_factor)
        return loss, probs, softmax, lse, z_factor


def _most(probs: Tensor) -> float:
    """The largest sum of probabilities. Each is rounded, and so is the sum that they were divided by: twice eps / 2."""
    return 1.0 + max(_OVER, torch.finfo(probs.dtype).eps)


def _is_first(ids: Tensor) -> Tensor:
    """(..., K): no earlier place of the row has the same id. A sort: comparing all pairs would take K times as much."""
    values, order = ids.sort(dim=-1, stable=True)
    first = torch.ones_like(ids, dtype=torch.bool)
    return first.scatter(-1, order[..., 1:], values[..., 1:] != values[..., :-1])


def check_teacher(input: Any, ids: Any, probs: Any, tail: Any, ignore_index: Any) -> None:
    """Refuse what is wrong with the teacher's part of a call, beside any head."""
    for name, value in (("input", input), ("ids", ids), ("probs", probs)):
        arguments.required(name, value)
    arguments.boolean("tail", tail)
    checks.dtype("ids", ids, checks.INDICES)
    checks.dtype("probs", probs, checks.FLOATS)
    if ids.dim() != input.dim():
        raise ValueError(f"ids has shape {tuple(ids.shape)}; expected {input.dim()} dimensions, (..., K): K ids a row")
    if not transforms.is_jit_traced():
        checks.same_shape("probs", probs.shape, ids.shape, "a probability for each of the ids")
    checks.same_device("probs", probs, ids, "ids are")
    if probs.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("probs requires grad, and the loss has no derivative for it: detach it")
    if probs.device.type != "cpu" or transforms.is_traced() or probs.numel() == 0:  # the rest reads values
        return
    values = torch.where(is_counted(ids, arguments.integer("ignore_index", ignore_index)), probs, 0.0)
    checks.refuse_log_probabilities("probs", values)
    most, largest = _most(probs), float(values.to(torch.float64).sum(-1).max())
    if tail and largest > most:
        raise ValueError(
            f"probs of a row add up to {largest}; expected at most {most}: with tail=True the other classes have what "
            "they leave of one"
        )


def bind_loss(call: LinearCall, probs: Tensor, tail: bool) -> tuple[LinearCall, TopK]:
    """The call as a sum of a function of rows, which applies the z-loss and the token weights."""
    assert call.ids is not None
    ignore_index, scale = call.loss.row_options.ignore_index, call.loss.lse_square_scale
    function = TopK(call.target, call.ids, probs, tail, call.token_weight, scale, ignore_index, accumulator(call.input))
    call = call.as_sum()
    return call._replace(loss=call.loss._replace(lse_square_scale=0.0), token_weight=None), function


@arguments.named
def linear_top_k_distillation_loss(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    probs: Tensor,
    *,
    tail: bool = False,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    divisor: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Cross entropy with a teacher's probabilities of K classes per row, from hidden states, without all logits.

    The loss of a row is -sum_k p_k log q_k, where q is the softmax of the student. The forward computes the gradients
    of a mean or a sum in three products, and the backward multiplies them by the upstream gradient, in place.

    Args:
        input, linear_weight, linear_bias: (..., H), (V, H) and (V,), as for ``linear_cross_entropy``.
        ids: (..., K), class indices, int64, int32 or uint8: K classes of each row. Places equal to ignore_index are
            skipped, equal classes add up, and a row is ignored if all of its places are.
        probs: (..., K), floating point, the probabilities p of these classes. They are a constant.
        tail: all other classes form one more class. Its probability is 1 - sum_k p_k. Its log-probability is accurate,
            however small or large it is. Probabilities that add up to more than one, by more than 0.001 and more than
            the rounding of their dtype (.0078 for bfloat16), are a ValueError on a CPU; on a GPU and in compiled code
            the loss is NaN. Where the ids name every class that is not masked by -inf, the tail adds nothing. Without a
            tail, the loss of probabilities that add up to less than one is not least at q = p.
        reduction: "mean" divides by the number of counted rows, or by the sum of their token_weight; "sum"; or "none",
            one number per row, which takes four products.
        ignore_index, lse_square_scale, softcap, logit_scale, token_weight: as for ``cross_entropy``.
        divisor, accumulate_dtype, chunk_rows, logits_dtype, batch_invariant: as for ``linear_cross_entropy``.
        skip_ignored: as for ``linear_cross_entropy``. Code compiled for a CPU computes all rows.

    Returns:
        The loss, float32 (float64 for float64 input): (), or with "none" the shape of the rows. It has no second
        derivatives, no torch.func, no forward-mode AD, no DTensors. In float16 it takes four products.

    Errors are those of ``cross_entropy``, and RuntimeError for probabilities that require grad. Log-probabilities are a
    ValueError on a CPU; on a GPU and in compiled code they give NaN.

    Examples:
        >>> hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(1000, 16)
        >>> probs, ids = torch.randn(6, 1000).softmax(-1).topk(8)
        >>> xent_ops.linear_top_k_distillation_loss(hidden, weight, ids, probs, tail=True).backward()
    """
    name = "xent_ops.linear_top_k_distillation_loss"
    transforms.refuse(name)
    refuse_dtensors(name, input, linear_weight, ids, probs)
    check_teacher(input, ids, probs, tail, ignore_index)
    raw_options = (ignore_index, 0.0, softcap, logit_scale, lse_square_scale, reduction)
    raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, None, batch_invariant)
    head_args = (input, linear_weight, ids, linear_bias, None)
    call = bind(*head_args, raw_options, raw_chunking, divisor, token_weight, several=True).in_autocast_dtype()
    refuse_call(call)
    call, function = bind_loss(call, probs, tail)
    if call.loss.reduction != "none":
        return loss_of_head(call, function)
    return function.all_values(*statistics(call, False, function.mask_ids), call.target).view(call.target.shape)


@arguments.named
def top_k_distillation_loss(
    input: Tensor,
    ids: Tensor,
    probs: Tensor,
    *,
    tail: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    divisor: Tensor | float | None = None,
    token_weight: Tensor | None = None,
) -> Tensor:
    """``linear_top_k_distillation_loss`` from logits: one pass over them forward, one backward.

    Args:
        input: logits of the student, (..., V), the classes last; float32, bfloat16, float16 or float64.
        ids, probs: (..., K), as for ``linear_top_k_distillation_loss``.
        tail: as there. It copies the logits, forward and backward.
        others: as for ``linear_top_k_distillation_loss``.

    Returns:
        The loss, and errors, as for ``linear_top_k_distillation_loss``.

    Examples:
        >>> logits = torch.randn(4, 10, requires_grad=True)
        >>> probs, ids = torch.randn(4, 10).softmax(-1).topk(3)
        >>> xent_ops.top_k_distillation_loss(logits, ids, probs, tail=True).backward()
    """
    name = "xent_ops.top_k_distillation_loss"
    transforms.refuse(name)
    refuse_dtensors(name, input, ids, probs)
    check_teacher(input, ids, probs, tail, ignore_index)
    arguments.tensors(input, ids)
    loss = arguments.loss_options(ignore_index, 0.0, softcap, logit_scale, lse_square_scale, reduction, input.dtype)
    divisor = arguments.divisor(divisor, input)
    linear_checks.reduced_by(divisor, input, reduction)
    arguments.optional("token_weight", token_weight)
    options, dtype = loss.row_options, accumulator(input)
    target, _ = target_and_ids(ids, input.dim() - 1, options.ignore_index)
    checks.token_weight(token_weight, target)
    function = TopK(target, ids, probs, tail, token_weight, loss.lse_square_scale, options.ignore_index, dtype)
    at_ids, lse, entropy = _ops.token_logits(
        arguments.classes_last(input, -1), ids, mask_ids=tail, **options.keywords()
    )
    values = function.all_values(at_ids, lse, entropy, target)
    if reduction == "none":
        return values.view(target.shape)
    if reduction == "mean":
        divisor = rows_counted(target, token_weight, options.ignore_index, dtype)
    return function.sum(values, target, divisor)
