"""A user's function of the statistics of tokens. The loop over chunks and the functions of rows call it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .head import float16, loop, packing
from .head.loop import RowGradients, RowRange
from .head.products import concatenated
from .head.shard import RowStatistics
from .kernels.reference import is_counted
from .kernels.sizes import depend_on_data
from .linear_call import LinearCall, statistics
from .ops import arguments, checks, transforms
from .ops.derivatives import value_and_derivatives
from .ops.linear import composite
from .ops.message_values import repr_for_message, type_name
from .ops.reduction import counted_sum
from .outputs import TokenLogProbs, log_probs_of_ids
from .token_probe import PROBED, FieldRecorder, first_call, is_learned_elsewhere

Function = Callable[..., Tensor]
"""``fn(stats, *rows)``: stats is a TokenLogProbs of n tokens; returns (n,)."""

Values = list[tuple[Tensor, Tensor]]

_INSTEAD = "xent_ops.linear_token_log_probs (token_log_probs of logits), which is differentiable, takes any function"


class _Agreed(NamedTuple):
    """Values that must be the same on all ranks."""

    rows: list[Tensor]
    reads_entropy: bool


class TokenRows:
    """Tensors that a loss reads beside the statistics of tokens. Its subclasses are the losses of ``loss_of_head``.

    ``rows`` are tensors (target's shape, *). If a token has several classes, ``ids``, they are the last of the rows.
    """

    reads_entropy = False
    mask_ids = False  # the lse is that of the classes that no id of the token names
    upstream_of_parts: Callable[..., Callable[..., RowGradients]]
    all_values: Callable[..., Tensor]

    def __init__(
        self, rows: list[Tensor], target: Tensor, ignore_index: int, dtype: torch.dtype, ids: Tensor | None
    ) -> None:
        self.rows, self.several = rows if ids is None else [*rows, ids], ids is not None
        self.ignore_index, self.dtype, self.number = ignore_index, dtype, target.numel()
        self._token_shapes = [row.shape[target.dim() :] for row in self.rows]  # per token

    def ids(self, parts: int = 1) -> Tensor | None:
        """(parts, tokens, K), or None if a token has one class."""
        return self._rows(parts, self.number // parts)[-1] if self.several else None

    def arrange(self, order: Callable[[Tensor], Tensor], number: int | None = None) -> None:
        """Bring the tokens of all rows into another order, or take ``number`` of them."""
        self.rows = [order(row) for row in self.rows]
        self.number = self.number if number is None else number

    def sum(self, values: Tensor, target: Tensor, divisor: Tensor | None) -> Tensor:
        """The sum over counted tokens, divided."""
        return counted_sum(values, target.reshape(-1), divisor, self.ignore_index)

    def _rows(self, *shape: int) -> list[Tensor]:
        """The rows, reshaped to (*shape, *)."""
        return [row.reshape(*shape, *tail) for row, tail in zip(self.rows, self._token_shapes, strict=True)]


class TokenFunction(TokenRows):
    """A user's function. A call on two tokens of zeros shows which fields it reads and that it returns two numbers.

    If one of ``learned``, the head's tensors, requires grad, its value must too.
    """

    def __init__(
        self,
        fn: Function,
        rows: Any,
        target: Tensor,
        ignore_index: int,
        dtype: torch.dtype,
        ids: Tensor | None = None,
        learned: Sequence[Tensor | None] = (),
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be a function of (stats, *rows), got {type_name(fn)}")
        super().__init__(_checked_rows(rows, target), target, ignore_index, dtype, ids)
        self.fn = fn
        self.reads_entropy = self._probe(target, learned)

    def agreed(self) -> _Agreed:
        return _Agreed(self.rows, self.reads_entropy)

    def _probe(self, target: Tensor, learned: Sequence[Tensor | None]) -> bool:
        leaves = [tensor for tensor in learned if tensor is not None and tensor.requires_grad]
        # Not bool: Dynamo of torch 2.11 does not trace it for a list.
        wants_grad, traced = torch.is_grad_enabled() and len(leaves) > 0, transforms.is_traced()
        zeros = target.new_zeros(PROBED, dtype=self.dtype, requires_grad=wants_grad and not traced)
        # Setting a gradient mode would leave an empty submodule in an exported program, which could then not be loaded.
        with contextlib.nullcontext() if transforms.is_exported() else torch.enable_grad():
            stats, value = self._call_on_zeros(zeros, target)
            if value.requires_grad if traced else is_learned_elsewhere(value, zeros):
                raise RuntimeError(
                    "fn closes over a tensor that requires grad, whose gradient would be lost: detach it. Where it "
                    f"should be learned, {_INSTEAD}"
                )
            if wants_grad and traced:  # Dynamo knows neither leaves nor the graph of a value
                value = self._call_on_zeros(zeros + leaves[0][..., :0].sum().to(self.dtype), target)[1]
        if wants_grad and not value.requires_grad:
            raise RuntimeError(
                "fn returned a tensor that needs no grad, so all gradients would be zero: it must depend on "
                "stats.log_probs, stats.lse or stats.entropy, not detached. For its value alone, use torch.no_grad()"
            )
        return stats.entropy_was_read

    def _call_on_zeros(self, zeros: Tensor, target: Tensor) -> tuple[FieldRecorder, Tensor]:
        shapes = self._token_shapes[:-1] if self.several else self._token_shapes
        rows = [row.new_zeros((PROBED, *shape)) for row, shape in zip(self.rows, shapes, strict=False)]
        stats = FieldRecorder(zeros, zeros.unsqueeze(-1).repeat(1, *self._token_shapes[-1]) if self.several else zeros)
        value = first_call(self.fn, stats, rows)
        self._check_value(value, PROBED, target)
        return stats, value

    def _check_value(self, value: Any, number: int, target: Tensor) -> None:
        if not isinstance(value, Tensor):
            found = "its stats" if isinstance(value, FieldRecorder) else type_name(value)
            raise TypeError(f"fn returned {found}; expected a tensor of shape (n,), one number a token")
        if not value.is_floating_point():
            raise TypeError(f"fn returned a tensor of dtype {value.dtype}; expected floating point, one number a token")
        if self.several and value.dim() == 2:
            raise ValueError(
                f"fn returned shape {tuple(value.shape)} for {number} tokens; expected ({number},), one number a "
                "token: add up over its K classes"
            )
        if tuple(value.shape) != (number,):
            raise ValueError(
                f"fn returned shape {tuple(value.shape)} for {number} tokens; expected ({number},), one number a "
                "token: it must not add up or average over tokens, the sum over tokens and divisor= do that"
            )
        if value.device != target.device:
            raise ValueError(f"fn returned a tensor on {value.device}; expected {target.device}, where its tokens are")

    def upstream_of_parts(self, parts: int, divisor: Tensor, values: Values) -> Callable[..., RowGradients]:
        """The function that head/loop.py calls between a chunk's statistics and its gradient.

        ``values`` gets the numbers of each chunk's tokens and their targets. ``divisor``, (), divides the sum.

        The row operator's loss is -log_prob, so its gradient is -grad_log_probs. With ids this loss is not used, and
        the lse gets the sum of all ids' gradients.
        """
        rows, factor = self._rows(parts, self.number // parts), divisor.reciprocal()

        def upstream(statistics: RowStatistics, part: RowRange) -> RowGradients:
            row_values = [part.of(row) for row in rows]
            if part.ids is not None:
                row_values[-1] = part.ids
            loss_or_at_ids = statistics.loss if statistics.at_ids is None else statistics.at_ids
            stats = self._statistics(loss_or_at_ids, statistics.lse, statistics.entropy, row_values)

            def token_values(log_probs: Tensor, lse: Tensor, entropy: Tensor = stats.entropy) -> Tensor:
                return self._call(TokenLogProbs(log_probs, entropy, lse), row_values)

            read = (stats.log_probs, stats.lse, stats.entropy) if self.reads_entropy else (stats.log_probs, stats.lse)
            value, (grad_log_probs, grad_lse, *entropies) = value_and_derivatives(token_values, read, factor)
            values.append((value, part.target))
            # In ignored rows a derivative may be NaN. The row operators leave out those of losses and entropies.
            if grad_lse is not None:
                grad_lse = torch.where(is_counted(part.target, self.ignore_index), grad_lse, 0.0)
            if grad_log_probs is None:
                grad_log_probs = torch.zeros_like(stats.log_probs)
            grad_entropy = entropies[0] if entropies else None
            if part.ids is None:
                return RowGradients(-grad_log_probs, grad_lse, grad_entropy)
            grad_ids = torch.where(is_counted(part.ids, self.ignore_index), grad_log_probs, 0.0)
            sum_of_ids = grad_ids.sum(-1)
            grad_lse = -sum_of_ids if grad_lse is None else grad_lse - sum_of_ids
            return RowGradients(grad_lse, grad_lse, grad_entropy, grad_ids=grad_ids)

        return upstream

    def all_values(self, loss_or_at_ids: Tensor, lse: Tensor, entropy: Tensor, target: Tensor) -> Tensor:
        """(N,): the numbers of all tokens, any in ignored rows. Differentiable.

        ``loss_or_at_ids``: losses, of the target's shape, or x of the ids, with K as an additional dimension.
        """
        return self._call(*self._all_stats(loss_or_at_ids, lse, entropy, target))

    def _all_stats(
        self, loss_or_at_ids: Tensor, lse: Tensor, entropy: Tensor, target: Tensor
    ) -> tuple[TokenLogProbs, list[Tensor]]:
        rows, lse = self._rows(self.number), lse.reshape(-1)
        loss_or_at_ids = loss_or_at_ids.reshape(self.number, *loss_or_at_ids.shape[target.dim() :])
        # The gradient of an ignored row's lse may be NaN. The row operators leave out those of losses and entropies.
        lse = torch.where(is_counted(target, self.ignore_index).reshape(-1), lse, lse.detach())
        return self._statistics(loss_or_at_ids, lse, entropy.reshape(-1), rows), rows

    def _statistics(
        self, loss_or_at_ids: Tensor, lse: Tensor, entropy: Tensor, rows: Sequence[Tensor]
    ) -> TokenLogProbs:
        """For tokens, (n,) or (n, K)."""
        if not self.reads_entropy:
            entropy = lse.new_full((), float("nan")).expand(lse.shape)
        if self.several:
            log_probs = log_probs_of_ids(loss_or_at_ids, lse, rows[-1], self.ignore_index)
        else:
            log_probs = -loss_or_at_ids
        return TokenLogProbs(log_probs, entropy, lse)

    def _call(self, stats: TokenLogProbs, rows: Sequence[Tensor]) -> Tensor:
        value = self.fn(stats, *(rows[:-1] if self.several else rows))
        if tuple(value.shape) != tuple(stats.lse.shape):
            self._check_value(value, stats.lse.shape[0], stats.lse)
        return value.to(self.dtype)

    def check(self, loss_or_at_ids: Tensor, lse: Tensor, entropy: Tensor, target: Tensor) -> None:
        """Raise if a token's number depends on the other tokens. It reads values, so it synchronises."""
        if torch.compiler.is_compiling():
            raise RuntimeError("check=True compares values, which a compiled graph cannot: use it in eager")
        with torch.no_grad():
            stats, rows = self._all_stats(loss_or_at_ids, lse, entropy, target)
            size = max(-(-self.number // 3), 1)
            parts = [slice(start, start + size) for start in range(0, max(self.number, 1), size)]
            joint = self._call(stats, rows)
            values_of_parts = [
                self._call(TokenLogProbs(*(value[part] for value in stats)), [row[part] for row in rows])
                for part in parts
            ]
            separate = torch.cat(values_of_parts)
            differ = ~torch.isclose(joint, separate, rtol=1e-4, atol=1e-6, equal_nan=True)
            differ &= is_counted(target, self.ignore_index).reshape(-1)
            if bool(differ.any()):
                token = int(differ.nonzero()[0])
                raise ValueError(
                    f"fn gives token {token} {float(joint[token])} beside all tokens, but {float(separate[token])} "
                    f"beside {size} of them: it must not mix tokens, since it is called a chunk at a time. {_INSTEAD}"
                )


def loss_of_head(call: LinearCall, function: TokenRows) -> Tensor:
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
    values = function.all_values(*statistics(call, function.reads_entropy, function.mask_ids), call.target)
    return function.sum(values, call.target, call.divisor)


def loss_by_chunks(
    call: LinearCall,
    target: Tensor,  # its own, or (ranks, ...) in the order of the ranks' inputs
    function: TokenRows,
    ranks: loop.OneRank,
    **layout: Any,  # scattered and sum_over_ranks, the arguments of head/loop.py
) -> Tensor:
    """The loss by the loop over chunks. At least one of input, weight and bias requires grad."""
    input, head, loss, divisor = call.input, call.head, call.loss, call.divisor
    if divisor is not None and divisor.requires_grad:
        checks.divisor_needs_grad()
    number = target.new_ones((), dtype=function.dtype) if divisor is None else divisor.to(function.dtype)
    split = float16.split_loss(input.dtype, number.expand(2), target, loss=loss)
    values: Values = []
    rows, count, packed, output_mask = input, None, None, loop.wanted_gradients(input, head)
    if head.chunking.skip_ignored:
        packed = packing.order_of_counted(target, loss.row_options.ignore_index, transforms.is_traced())
    if packed is not None:
        rows, target, count = packed.pack_rows(input.detach()), packed.indices(), packed.count
        function.arrange(packed.pack_rows, packed.number)
    parts = ranks.world if layout.get("scattered") else 1
    upstream = function.upstream_of_parts(parts, split.divisors[0], values)
    grads = loop.gradients(
        rows,
        target,
        head,
        loss,
        upstream,
        ranks,
        output_mask,
        with_entropy=function.reads_entropy,
        mask_ids=function.mask_ids,
        ids=function.ids(parts),
        count=count,
        **layout,
    )
    if packed is not None and output_mask[0]:
        grads = grads._replace(input=packed.unpack_rows(grads.input).view(input.shape))
    numbers, targets = (concatenated(parts) for parts in zip(*values, strict=True))
    return loop.value(function.sum(numbers, targets, divisor), input, head, grads, split)


def _checked_rows(rows: Any, target: Tensor) -> list[Tensor]:
    if isinstance(rows, Tensor) or not isinstance(rows, (tuple, list)):
        hint = ": for one tensor pass rows=(tensor,)" if isinstance(rows, Tensor) else ""
        raise TypeError(
            f"rows must be a tuple of tensors, got {repr_for_message(rows) if not hint else 'a tensor'}{hint}"
        )
    for i, row in enumerate(rows):
        name = f"rows[{i}]"
        arguments.required(name, row)
        if row.dim() < target.dim() or any(
            size != expected for size, expected in zip(row.shape, target.shape, strict=False)
        ):
            raise ValueError(
                f"{name} has shape {tuple(row.shape)}; expected {tuple(target.shape)} in front, as the target's (one "
                "number a sequence: unsqueeze and expand it)"
            )
        if row.device != target.device:
            raise ValueError(f"{name} is on {row.device} but target is on {target.device}; both must be the same")
        if row.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires grad, which would be lost: detach it. Where it should be learned, {_INSTEAD}"
            )
    return [row.clone() for row in rows]  # for a function that writes to them
