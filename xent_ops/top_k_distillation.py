"""Losses that learn the probabilities of a few classes per row, a teacher's top k, from logits or from hidden states.

kernels/reference_top_k_distillation.py has the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .head.float16 import Split
from .head.loop import RowGradients, RowRange
from .head.shard import RowStatistics
from .kernels.options import LossOptions, Reduction
from .kernels.reductions import weights_of_mean
from .kernels.reference import accumulator, is_counted
from .kernels.reference_top_k_distillation import most
from .linear_call import LinearCall, bind, refuse_call, rows_counted, statistics_of_head
from .ops import arguments, checks, scalars, transforms
from .ops.dtensors import only_plain_tensors
from .ops.formulas import differentiable
from .ops.token_logits import at_least_one_class, target_and_ids
from .token_function import loss_of_tokens
from .user_function import DerivedRows, Values

if TYPE_CHECKING:
    from .distributed.bound import Shard


class TopKLoss(DerivedRows):
    """The loss of each row, from x of its ids and an lse. Its rows are the probabilities, and weights of tokens."""

    def __init__(
        self,
        target: Tensor,
        ids: Tensor,
        probs: Tensor,
        tail: bool,
        token_weight: Tensor | None,
        loss: LossOptions,
        dtype: torch.dtype,
    ) -> None:
        self.mask_ids, ignore_index = tail, loss.row_options.ignore_index
        self.options = {"ignore_index": ignore_index, "lse_square_scale": loss.lse_square_scale}
        super().__init__([probs] if token_weight is None else [probs, token_weight], target, ignore_index, dtype, ids)

    def upstream_of_parts(self, parts: int, split: Split, values: Values) -> Callable[..., RowGradients]:
        rows, divisor = self._rows(parts, self.number // parts)[:-1], split.divisors[0]

        def upstream(statistics: RowStatistics, part: RowRange) -> RowGradients:
            row_values = [part.of(row) for row in rows]
            row_args = (statistics.at_ids, statistics.lse, statistics.lse_low, part.ids)
            loss, grad_ids, grad_lse = self._losses(*row_args, *row_values)
            values.append((loss, part.target))
            return RowGradients(grad_lse, grad_lse / divisor, grad_ids=grad_ids / divisor)  # ignored rows are not read

        return upstream

    def all_values(self, loss_or_at_ids: Tensor, lse: Tensor, entropy: Tensor, low: Tensor, target: Tensor) -> Tensor:
        *rows, ids = self._rows(self.number)
        return self._losses(loss_or_at_ids.reshape(ids.shape), lse.reshape(-1), low.reshape(-1), ids, *rows)[0]

    def _losses(
        self, at_ids: Any, lse: Tensor, low: Tensor, ids: Any, probs: Tensor, token_weight: Tensor | None = None
    ) -> Any:
        """(losses, their derivatives by at_ids, and by lse) of n rows."""
        args = (at_ids, lse, ids, probs, token_weight, self.mask_ids, low)
        return differentiable("top_k_distillation", *args, **self.options)


def check_teacher(input: Any, ids: Any, probs: Any, tail: Any, ignore_index: Any) -> None:
    """Refuse what is wrong with the teacher's part of a call, beside any head."""
    for name, value in (("input", input), ("ids", ids), ("probs", probs)):
        arguments.required(name, value)
    arguments.boolean("tail", tail)
    checks.dtype("ids", ids, checks.INDICES)
    checks.dtype("probs", probs, checks.FLOATS)
    if ids.dim() != input.dim():
        raise ValueError(f"ids has shape {tuple(ids.shape)}; expected {input.dim()} dimensions, (..., K): K ids a row")
    at_least_one_class("ids", ids)
    if not transforms.is_jit_traced():
        checks.same_shape("probs", probs.shape, ids.shape, "a probability for each of the ids")
    checks.same_device("probs", probs, ids, "ids are")
    checks.constant("probs", probs)
    if not transforms.can_read(ids, probs) or probs.numel() == 0:  # the rest reads values
        return
    values = torch.where(is_counted(ids, scalars.integer("ignore_index", ignore_index)), probs, 0.0)
    checks.refuse_log_probabilities("probs", values)
    if tail:
        values = values.to(torch.float64)
        totals, limits = values.sum(-1).reshape(-1), most(values).reshape(-1)
        row = int((totals - limits).argmax())
        if totals[row] > limits[row]:
            raise ValueError(
                f"probs of a row of ids add up to {float(totals[row]):.6g}; expected at most {float(limits[row]):.6g}, "
                "one and what rounding to bfloat16 adds: with tail=True the classes beside ids have what probs leave "
                "of one. If ids are all classes that have a probability, pass probs / probs.sum(-1, keepdim=True)"
            )


def bind_loss(call: LinearCall, probs: Tensor, tail: bool) -> tuple[LinearCall, TopKLoss]:
    """The call as a sum of a function of rows, which applies the z-loss and the token weights."""
    weights, loss, call = call.token_weight, call.loss, call.as_sum()
    assert call.ids is not None
    if weights is not None and call.divisor is not None:
        weights = weights_of_mean(weights, call.divisor)
    function = TopKLoss(call.target, call.ids, probs, tail, weights, loss, accumulator(call.input))
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
    shard: Shard | None = None,
) -> Tensor:
    """Cross entropy with a teacher's probabilities of K classes per row, from hidden states, without all logits.

    The loss of a row is -sum_k p_k log q_k, where q is the softmax of the student. The forward computes the gradients
    of a mean or a sum in three matrix multiplications, and the backward multiplies them by the upstream gradient, in
    place.

    Args:
        input, linear_weight, linear_bias: (..., H), (V, H) and (V,), as for ``linear_cross_entropy``.
        ids: (..., K), class indices, int64, int32 or uint8: K classes of each row. Places equal to ignore_index are
            skipped, equal classes add up, and a row is ignored if all of its places are.
        probs: (..., K), floating point, the probabilities p of these classes. They are a constant.
        tail: all other classes form one more class. Its probability is 1 - sum_k p_k. Its log-probability is accurate,
            however small or large it is. The p_k may add up to what rounding to bfloat16 explains, and the tail then
            has 0: 1.0078, and .0039 more for each nat of -sum_k p_k log p_k, for log-probabilities that were rounded.
            More is a ValueError on a CPU; on a GPU and in compiled code the loss is NaN. Where the ids name every class
            that is not masked by -inf, the tail adds nothing. Without a tail, the loss of probabilities that add up to
            less than one is not least at q = p.
        reduction: "mean" divides by the number of counted rows, or by the sum of their token_weight; "sum"; or "none",
            one number per row, which takes four matrix multiplications.
        ignore_index, lse_square_scale, softcap, logit_scale, token_weight: as for ``cross_entropy``.
        divisor, accumulate_dtype, chunk_rows, batch_invariant: as for ``linear_cross_entropy``.
        logits_dtype: as for ``linear_distillation_loss``, of the student.
        skip_ignored: as for ``linear_cross_entropy``. Code compiled for a CPU computes all rows.
        shard: as for ``linear_cross_entropy``, of a mean or a sum, with K + 3 numbers a row. Not with ``skip_ignored``.

    Returns:
        The loss, float32 (float64 for float64 input): (), or with "none" the shape of the rows. It has no second
        derivatives, no torch.func, no forward-mode AD, no DTensors. In float16 it takes four matrix multiplications.

    Errors are those of ``cross_entropy``, and RuntimeError for probabilities that require grad. Log-probabilities are a
    ValueError on a CPU; on a GPU and in compiled code they give NaN.

    Examples:
        >>> hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(1000, 16)
        >>> probs, ids = torch.randn(6, 1000).softmax(-1).topk(8)
        >>> xent_ops.linear_top_k_distillation_loss(hidden, weight, ids, probs, tail=True).backward()
    """
    tensors = (input, linear_weight, ids, probs, linear_bias, token_weight, divisor)
    raw_options = (ignore_index, 0.0, softcap, logit_scale, lse_square_scale, reduction)
    raw_chunking = (accumulate_dtype, chunk_rows, skip_ignored, logits_dtype, None, batch_invariant)

    def bind_call() -> LinearCall:
        check_teacher(input, ids, probs, tail, ignore_index)
        head_args = (input, linear_weight, ids, linear_bias, None)
        row_args = (raw_options, raw_chunking, divisor, token_weight)
        return bind(*head_args, *row_args, several=True, two_models=True)

    if shard is not None:
        from .distributed import token_loss as over_ranks  # this import is slow

        return over_ranks.top_k_distillation(shard, bind_call, bind_loss, probs, tail)
    only_plain_tensors("xent_ops.linear_top_k_distillation_loss", *tensors)
    call = bind_call().in_autocast_dtype()
    refuse_call(call)
    call, function = bind_loss(call, probs, tail)
    if call.loss.reduction != "none":
        return loss_of_tokens(call, function)
    return function.all_values(*statistics_of_head(call, False, function.mask_ids), call.target).view(call.target.shape)


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
    only_plain_tensors("xent_ops.top_k_distillation_loss", input, ids, probs, token_weight, divisor)
    check_teacher(input, ids, probs, tail, ignore_index)
    arguments.tensors(input, ids)
    loss = arguments.loss_options(ignore_index, 0.0, softcap, logit_scale, lse_square_scale, reduction, input.dtype)
    divisor = arguments.divisor(divisor, input, reduction)
    arguments.optional("token_weight", token_weight)
    options, dtype = loss.row_options, accumulator(input)
    target, _ = target_and_ids(ids, input.dim() - 1, options.ignore_index)
    checks.token_weight(token_weight, target)
    if reduction == "mean":
        divisor = rows_counted(target, token_weight, options.ignore_index, dtype)
    if token_weight is not None and divisor is not None:
        token_weight = weights_of_mean(token_weight, divisor)
    function = TopKLoss(target, ids, probs, tail, token_weight, loss, dtype)
    keywords = {"mask_ids": tail, **options.keywords()}
    at_ids, lse, entropy, low = differentiable("token_logits", arguments.classes_last(input, -1), ids, **keywords)
    values = function.all_values(at_ids, lse, entropy, low, target)
    if reduction == "none":
        return values.view(target.shape)
    return function.counted_sum(values, target, divisor)
