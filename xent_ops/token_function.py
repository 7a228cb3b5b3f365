"""A user's function of tokens' log-probabilities, and the loop over chunks for all losses with code in its middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .head import float16, loop, packing
from .head.loop import RowGradients, RowRange
from .head.products import concatenated
from .head.shard import RowStatistics
from .kernels.reference import is_counted
from .kernels.sizes import depend_on_data
from .linear_call import LinearCall
from .ops import checks, transforms
from .ops.linear import composite
from .ops.linear.chunk import with_gradients
from .outputs import TokenLogProbs, log_probs_of_rows
from .token_probe import FieldRecorder
from .user_function import DerivedRows, TokenRows, UserFunction, Values


class _Recorder(FieldRecorder):
    record, learned = TokenLogProbs, ("log_probs", "lse", "entropy")


class TokenFunction(UserFunction):
    """Of TokenLogProbs."""

    recorder = _Recorder
    instead = "xent_ops.linear_token_log_probs (token_log_probs of logits), which is differentiable, takes any function"

    @property
    def reads_entropy(self) -> bool:  # type: ignore[override]
        return "entropy" in self.read

    def zeros(self, zeros: Tensor) -> dict[str, Tensor]:
        log_probs = zeros.unsqueeze(-1).repeat(1, *self._token_shapes[-1]) if self.several else zeros
        return {**super().zeros(zeros), "log_probs": log_probs}

    def upstream_of_parts(self, parts: int, split: float16.Split, values: Values) -> Callable[..., RowGradients]:
        """The row operator's loss is -log_prob, so its gradient is -grad_log_probs. With ids this loss is not used, and
        the lse gets the sum of all ids' gradients.
        """
        rows = self._rows(parts, self.number // parts)

        def upstream(statistics: RowStatistics, part: RowRange) -> RowGradients:
            row_values = [part.of(row) for row in rows]
            if part.ids is not None:
                row_values[-1] = part.ids
            loss_or_at_ids = statistics.loss if statistics.at_ids is None else statistics.at_ids
            row_statistics = (statistics.lse, statistics.entropy, statistics.lse_low)
            fields = self._fields(loss_or_at_ids, *row_statistics, row_values)

            def token_values(*leaves: Tensor) -> Tensor:
                return self._call(dict(zip(fields, leaves, strict=True)), row_values, part.target)

            read = tuple(fields.values())
            value, (grad_log_probs, grad_lse, *entropies) = self.value_and_derivatives(token_values, read, split)
            values.append((value, part.target))
            # In ignored rows a derivative may be NaN. The row operators leave out those of losses and entropies.
            if grad_lse is not None:
                grad_lse = torch.where(is_counted(part.target, self.ignore_index), grad_lse, 0.0)
            if grad_log_probs is None:
                grad_log_probs = torch.zeros_like(fields["log_probs"])
            grad_entropy = entropies[0] if entropies else None
            if part.ids is None:
                return RowGradients(-grad_log_probs, grad_lse, grad_entropy)
            grad_ids = torch.where(is_counted(part.ids, self.ignore_index), grad_log_probs, 0.0)
            sum_of_ids = grad_ids.sum(-1)
            grad_lse = -sum_of_ids if grad_lse is None else grad_lse - sum_of_ids
            return RowGradients(grad_lse, grad_lse, grad_entropy, grad_ids=grad_ids)

        return upstream

    def all_stats(
        self, loss_or_at_ids: Tensor, lse: Tensor, entropy: Tensor, low: Tensor, target: Tensor
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """``loss_or_at_ids``: losses, of the target's shape, or x of the ids, with K as an additional dimension."""
        rows, lse = self._rows(self.number), lse.reshape(-1)
        loss_or_at_ids = loss_or_at_ids.reshape(self.number, *loss_or_at_ids.shape[target.dim() :])
        # The gradient of an ignored row's lse may be NaN. The row operators leave out those of losses and entropies.
        lse = torch.where(is_counted(target, self.ignore_index).reshape(-1), lse, lse.detach())
        return self._fields(loss_or_at_ids, lse, entropy.reshape(-1), low.reshape(-1), rows), rows

    def _fields(
        self, loss_or_at_ids: Tensor, lse: Tensor, entropy: Tensor, low: Tensor, rows: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """For tokens, (n,) or (n, K). The backward reads lse and entropy, and fn may write to what it gets: copies."""
        ids = rows[-1] if self.several else None
        log_probs = log_probs_of_rows(loss_or_at_ids, lse, entropy, low, ids, self.ignore_index).log_probs
        fields = {"log_probs": log_probs, "lse": lse.clone() if "lse" in self.read else lse}
        return {**fields, "entropy": entropy.clone()} if self.reads_entropy else fields


def loss_of_tokens(call: LinearCall, function: DerivedRows) -> Tensor:
    """A sum over the tokens, for plain tensors."""
    head, input = call.head, call.input
    # Exceptions: an exported program with the derivative of fn fails when it runs. If the
    # number of rows depends on data, the number of chunks is unknown. In float16 the scale that keeps products in range
    # needs the derivatives of all rows.
    in_forward = (
        composite.gradients_in_forward(input, head.weight, head.bias)
        and head.chunking.products is None
        and not transforms.is_exported()
        and not depend_on_data(input)
        and input.dtype != torch.float16
    )
    if in_forward:
        return loss_by_chunks(call, call.target, function, loop.OneRank())
    values = function.all_values(*function.statistics(call), call.target)
    return function.counted_sum(values, call.target, call.divisor)


def loss_by_chunks(
    call: LinearCall,
    target: Tensor,  # its own, or (ranks, ...) in the order of the ranks' inputs
    function: TokenRows,
    ranks: loop.OneRank,
) -> Tensor:
    """The loss by the loop over chunks: a sum, or with reduction="none" the numbers of rows, of the target's shape."""
    input, head, loss, divisor = call.input, call.head, call.loss, call.divisor
    scattered = call.sequence_dim is not None
    output_mask = loop.wanted_gradients(input, head)
    if any(output_mask):
        checks.constant("divisor", divisor)
    number = target.new_ones((), dtype=function.dtype) if divisor is None else divisor.to(function.dtype)
    split = float16.split_loss(input.dtype, number.expand(2), target, function.token_weight, loss=loss)
    values: Values = []
    inputs, count, packed = function.inputs(input), None, None
    if head.chunking.skip_ignored:
        packed = packing.order_of_counted(target, function.ignore_index, transforms.is_traced())
    if packed is not None:
        inputs = tuple([packed.pack(rows.detach()) for rows in inputs])
        target, count = packed.indices(), packed.count
        function.arrange(packed.pack, packed.number)
    parts = ranks.world if scattered else 1
    steps = function.steps(head, loss, function.upstream_of_parts(parts, split, values), ranks)
    row_args: dict[str, Any] = {"ids": function.ids(parts), "count": count, "scattered": scattered}
    row_args["shares"] = None if split.shares is None else split.shares.reshape(parts, -1)
    grads = loop.run_loop(steps, inputs, target, head, ranks, output_mask, function.ignore_index, **row_args)
    if packed is not None and output_mask[0]:
        grads = grads._replace(input=packed.unpack(grads.input).view(input.shape))
    if loss.reduction == "none":
        return concatenated([chunk.view(parts, -1) for chunk, _ in values], 1).view(target.shape)
    numbers, targets = (concatenated(parts) for parts in zip(*values, strict=True))
    total = function.counted_sum(numbers, targets, divisor)
    if not any(output_mask):
        return total
    return with_gradients(total, input, head, grads, split, ranks.rank if scattered else None)
