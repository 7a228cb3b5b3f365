"""The arguments of a head and its loss in one record. They are checked once; every implementation computes from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .head.loop import HeadSlice
from .kernels.options import LossOptions, RowOptions
from .kernels.reference import accumulator
from .ops import arguments, checks, transforms
from .ops.formulas import differentiable
from .ops.library import check_call_of
from .ops.linear import composite
from .ops.reduction import divisors_of
from .ops.token_logits import target_and_ids

_ops = torch.ops.xent


class LinearCall(NamedTuple):
    """Plain tensors, all of them or one rank's part. distributed/consistency.py compares all fields between ranks."""

    target: Tensor  # (...), a class index for each row; with several classes one of them
    input: Tensor  # (..., H)
    head: HeadSlice
    loss: LossOptions
    divisor: Tensor | None
    token_weight: Tensor | None
    ids: Tensor | None = None  # (..., K), several classes of each row
    sequence_dim: int | None = None  # over ranks: the dimension of the target along which the input is split
    pipelined: bool = False  # over ranks: three products

    def in_autocast_dtype(self) -> LinearCall:
        input, weight, bias = composite.cast_for_autocast(self.input, self.head.weight, self.head.bias)
        if input is self.input and weight is self.head.weight and bias is self.head.bias:
            return self  # copying the records would take Dynamo 6 ms
        return self._replace(input=input, head=self.head._replace(weight=weight, bias=bias))

    def as_sum(self) -> LinearCall:
        """Turn a mean into a sum with a divisor: the number of counted rows, or the sum of their weights."""
        if self.loss.reduction != "mean":
            return self
        ignore_index = self.loss.row_options.ignore_index
        divisor = rows_counted(self.target, self.token_weight, ignore_index, accumulator(self.input))
        return self._replace(divisor=divisor, loss=self.loss._replace(reduction="sum"))


def rows_counted(target: Tensor, token_weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """(): the number of counted rows, or the sum of their weights."""
    return divisors_of(target, None, token_weight, None, LossOptions(RowOptions(ignore_index)), dtype)[1]


def bind(
    input: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    class_weight: Any,
    raw_options: tuple[Any, Any, Any, Any, Any, str],  # the arguments of arguments.loss_options
    raw_chunking: tuple[Any, ...],  # the arguments of arguments.chunks
    divisor: Any = None,
    token_weight: Any = None,
    *,
    several: bool = False,  # the target may be (..., K)
    two_models: bool = False,  # near ones differ by less than the rounding of logits to 16 bits: float32 by default
) -> LinearCall:
    """Refuse values that are wrong on any device. The operators refuse tensors that do not fit together."""
    arguments.linear(input, linear_weight, target, linear_bias, class_weight)
    loss, ids = arguments.loss_options(*raw_options, input.dtype), None
    if several:
        target, ids = target_and_ids(target, input.dim() - 1, loss.row_options.ignore_index)
    divisor = arguments.divisor(divisor, input, loss.reduction)
    if token_weight is not None:
        arguments.required("token_weight", token_weight)
    accumulate_dtype, chunking = arguments.chunks(*raw_chunking)
    if two_models and chunking.logits_dtype is None:
        chunking = chunking._replace(logits_dtype=accumulator(input))
    if target.is_floating_point() and target.dim() == input.dim():
        raise TypeError(
            f"target has shape {tuple(target.shape)} and dtype {target.dtype}: class probabilities need all "
            "logits. Call xent_ops.cross_entropy(F.linear(input, linear_weight, linear_bias), target, dim=-1)"
        )
    checks.constant("weight", class_weight)
    head = HeadSlice(linear_weight, linear_bias, class_weight, accumulate_dtype=accumulate_dtype, chunking=chunking)
    return LinearCall(target, input, head, loss, divisor, token_weight, ids)


def refuse_call(call: LinearCall) -> None:
    """Refuse what the operators would, for functions that compute before they call one, or call one for each chunk."""
    head, options = call.head, call.loss.row_options
    if transforms.is_jit_traced():  # its sizes are tensors
        return
    checks.token_weight(call.token_weight, call.target)
    keywords = {"accumulate_dtype": head.accumulate_dtype, **head.chunking.keywords(), **options._asdict()}
    head_args = (call.input, head.weight, call.target, head.bias, head.class_weight)
    check_call_of("linear_cross_entropy_forward", *head_args, ids=call.ids, **keywords)
    if call.ids is not None and transforms.can_read(call.ids):  # the row operators of a chunk read no ids
        checks.index_values(None, call.ids, None, head.weight.shape[0], options.ignore_index)


def cross_entropy_of_head(call: LinearCall) -> Tensor:
    """The loss for plain tensors and class indices. Tracers see one operator; in eager its checks were made."""
    head, chunking = call.head, call.head.chunking.keywords()
    args = (call.input, head.weight, call.target, head.bias, head.class_weight, call.divisor, call.token_weight)
    if transforms.any_tracer():
        options = call.loss.keywords()
        return _ops.linear_cross_entropy(*args, accumulate_dtype=head.accumulate_dtype, **chunking, **options)
    checks.token_weight(call.token_weight, call.target)
    return composite.loss_of_head(*args, head.accumulate_dtype, chunking, call.loss)


def statistics_of_head(
    call: LinearCall, with_entropy: bool, mask_ids: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(losses of rows or x of their ids, lse, entropy, lse_low). ``mask_ids``: lse of the other classes."""
    head, options = call.head, call.loss.row_options
    keywords = {"accumulate_dtype": head.accumulate_dtype, **head.chunking.keywords(), **options.keywords()}
    args: tuple[Any, ...] = (call.input, head.weight, call.target, head.bias, None, False, with_entropy)
    args = args if call.ids is None else (*args, call.ids, mask_ids)
    loss, lse, _, entropy, low, at_ids = differentiable("linear_cross_entropy_forward", *args, **keywords)
    return loss if call.ids is None else at_ids, lse, entropy, low
