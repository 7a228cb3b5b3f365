"""A user's function of tokens, and what every loss that the loop over chunks computes has of its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .head import loop
from .head.float16 import Split
from .kernels.options import LossOptions
from .kernels.reference import is_counted
from .linear_call import LinearCall, statistics_of_head
from .ops import arguments, transforms
from .ops.derivatives import value_and_derivatives
from .ops.dtensors import is_dtensor, refuse_beside_plain
from .ops.message_values import repr_for_message, type_name
from .ops.reduction import counted_sum
from .token_probe import (
    PROBED,
    FieldRecorder,
    first_call,
    is_learned_elsewhere,
    refuse_closure_over_all_tokens,
)

Function = Callable[..., Tensor]
"""``fn(stats, *rows)``: stats is a NamedTuple of n tokens; returns (n,)."""

Values = list[tuple[Tensor, Tensor]]


class _Agreed(NamedTuple):
    """Values that must be the same on all ranks."""

    rows: list[Tensor]
    read: tuple[str, ...]


class TokenRows:
    """Tensors that a loss reads beside the statistics of tokens, and what the loop of token_function.py asks of it.

    ``rows`` are tensors (target's shape, *). If a token has several classes, ``ids``, they are the last of the rows.
    """

    read: tuple[str, ...] = ()  # the fields of a token that it reads
    reads_entropy = False
    mask_ids = False  # the lse is that of the classes that no id of the token names
    token_weight: Tensor | None = None  # what ``all_values`` multiplies the numbers of tokens by
    # (parts, the loss's divisors and factors, values) to the function that the loop calls between a chunk's statistics
    # and its gradient. ``values`` gets the numbers of each chunk's tokens and their targets.
    upstream_of_parts: Callable[[int, Split, Values], Callable[..., Any]]

    def __init__(
        self, rows: list[Tensor], target: Tensor, ignore_index: int, dtype: torch.dtype, ids: Tensor | None
    ) -> None:
        self.rows, self.several = rows if ids is None else [*rows, ids], ids is not None
        self.ignore_index, self.dtype, self.number = ignore_index, dtype, target.numel()
        self._token_shapes = [row.shape[target.dim() :] for row in self.rows]  # per token

    def agreed(self) -> _Agreed:
        return _Agreed(self.rows, self.read)

    def inputs(self, input: Tensor) -> tuple[Tensor, ...]:
        """Those of all heads, with the same rows."""
        return (input,)

    def steps(self, head: loop.HeadSlice, loss: LossOptions, upstream: Any, ranks: loop.OneRank) -> loop.Steps:
        return loop.CrossEntropySteps(head, loss, upstream, ranks, self.reads_entropy, self.mask_ids)

    def ids(self, parts: int = 1) -> Tensor | None:
        """(parts, tokens, K), or None if a token has one class."""
        return self._rows(parts, self.number // parts)[-1] if self.several else None

    def arrange(self, order: Callable[[Tensor], Tensor], number: int | None = None) -> None:
        """Bring the tokens of all rows into another order, or take ``number`` of them."""
        self.rows = [order(row) for row in self.rows]
        self.number = self.number if number is None else number

    def counted_sum(self, values: Tensor, target: Tensor, divisor: Tensor | None) -> Tensor:
        """The sum over counted tokens, divided."""
        return counted_sum(values, target.reshape(-1), divisor, self.ignore_index)

    def _rows(self, *shape: int) -> list[Tensor]:
        """The rows, reshaped to (*shape, *)."""
        return [row.reshape(*shape, *tail) for row, tail in zip(self.rows, self._token_shapes, strict=True)]


class DerivedRows(TokenRows):
    """Rows of which autograd can derive the loss too, of all at once."""

    # (*the statistics of all rows, target) to (N,), the numbers of all tokens, any in ignored rows. Differentiable.
    all_values: Callable[..., Tensor]

    def statistics(self, call: LinearCall) -> tuple[Tensor, ...]:
        """Of all rows, for ``all_values``."""
        return statistics_of_head(call, self.reads_entropy, self.mask_ids)


class UserFunction(DerivedRows):
    """A user's function. A call on two tokens of zeros shows which fields it reads and that it returns two numbers.

    If one of ``learned``, the head's tensors, requires grad, its value must too.
    """

    recorder: type[FieldRecorder]
    instead: str  # the function that is differentiable and takes any function of its results
    # (*the statistics of all rows, target) to the fields that are known, and rows
    all_stats: Callable[..., tuple[dict[str, Tensor], list[Tensor]]]

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
        super().__init__(_checked_rows(rows, target, self.instead), target, ignore_index, dtype, ids)
        self.fn = fn
        self.read = self._probe(target, learned)

    def all_values(self, *statistics_and_target: Tensor) -> Tensor:
        return self._call(*self.all_stats(*statistics_and_target), statistics_and_target[-1].reshape(-1))

    def zeros(self, zeros: Tensor) -> dict[str, Tensor]:
        """The fields of tokens of zeros."""
        learned, constant = self.recorder.learned, zeros.detach()
        return {name: zeros if name in learned else constant for name in self.recorder.record._fields}

    def _probe(self, target: Tensor, learned: Sequence[Tensor | None]) -> tuple[str, ...]:
        """The fields that it reads."""
        leaves = [tensor for tensor in learned if tensor is not None and tensor.requires_grad]
        # Not bool: Dynamo of torch 2.11 does not trace it for a list.
        self.wants_grad = wants_grad = torch.is_grad_enabled() and len(leaves) > 0
        traced = transforms.is_traced()
        zeros = target.new_zeros(PROBED, dtype=self.dtype)
        if wants_grad and not traced:
            zeros.requires_grad_()  # a leaf also where new_zeros of a subclass returns a view of its result
        # Setting a gradient mode would leave an empty submodule in an exported program, which could then not be loaded.
        with contextlib.nullcontext() if transforms.is_exported() else torch.enable_grad():
            stats, value = self._call_on_zeros(zeros, target)
            if value.requires_grad if traced else is_learned_elsewhere(value, zeros):
                self._refuse_closure()
            if wants_grad and traced:  # Dynamo knows neither leaves nor the graph of a value
                value = self._call_on_zeros(zeros + leaves[0][..., :0].sum().to(self.dtype), target)[1]
        if wants_grad and not value.requires_grad:
            self._refuse_constant()
        return tuple([name for name in self.recorder.record._fields if name in stats.read])

    def _refuse_closure(self) -> NoReturn:
        raise RuntimeError(
            "fn closes over a tensor that requires grad, whose gradient would be lost: detach it. Where it should be "
            f"learned, {self.instead}"
        )

    def _refuse_constant(self) -> NoReturn:
        raise RuntimeError(
            "fn returned a tensor that needs no grad, so all gradients would be zero: it must depend on "
            f"{self.recorder.listed(self.recorder.learned, 'or')}, not detached. For its value alone, use "
            "torch.no_grad()"
        )

    def value_and_derivatives(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], split: Split
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Of a chunk. A function may do in it what it did not do in its first call."""

        def checked(*leaves: Tensor) -> Tensor:
            value = function(*leaves)
            if self.wants_grad and not torch.compiler.is_compiling():
                if not value.requires_grad:
                    self._refuse_constant()
                if is_learned_elsewhere(value, *leaves):
                    self._refuse_closure()
            return value

        return value_and_derivatives(checked, inputs, split.divisors[0].reciprocal())

    def _call_on_zeros(self, zeros: Tensor, target: Tensor) -> tuple[FieldRecorder, Tensor]:
        shapes = self._token_shapes[:-1] if self.several else self._token_shapes
        rows = [row.new_zeros((PROBED, *shape)) for row, shape in zip(self.rows, shapes, strict=False)]
        stats = self.recorder(self.zeros(zeros))
        value = first_call(self.fn, stats, rows, target.shape)
        self._check_value(value, PROBED, target)
        return stats, value

    def _check_value(self, value: Any, number: int, target: Tensor) -> None:
        if not isinstance(value, Tensor):
            found = "its stats" if isinstance(value, FieldRecorder) else type_name(value)
            raise TypeError(f"fn returned {found}; expected a tensor of shape (n,), one number a token")
        if not value.is_floating_point():
            raise TypeError(f"fn returned a tensor of dtype {value.dtype}; expected floating point, one number a token")
        if tuple(value.shape) != (number,):
            refuse_closure_over_all_tokens(self.fn, target.shape)
            hint = "it must not add up or average over tokens, the sum over tokens and divisor= do that"
            if tuple(value.shape) == (number, 1) and not self.several:
                hint = "squeeze(-1) gives it"
            elif value.dim() == 2 and self.several:
                hint = "add up over its K classes"
            raise ValueError(
                f"fn returned shape {tuple(value.shape)} for {number} tokens; expected ({number},), one number a "
                f"token: {hint}"
            )
        if value.device != target.device:
            raise ValueError(f"fn returned a tensor on {value.device}; expected {target.device}, where its tokens are")

    def _call(self, fields: dict[str, Tensor], rows: Sequence[Tensor], target: Tensor) -> Tensor:
        """Of the tokens with these targets, (n,)."""
        value = self.fn(self.recorder(fields, self.read), *(rows[:-1] if self.several else rows))
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(target.shape):
            self._check_value(value, target.shape[0], target)
        return value.to(self.dtype)

    def check(self, *statistics_and_target: Tensor) -> None:
        """Raise if a token's number depends on the other tokens. It reads values, so it synchronises."""
        if torch.compiler.is_compiling():
            raise RuntimeError("check=True compares values, which a compiled graph cannot: use it in eager")
        with torch.no_grad():
            fields, rows = self.all_stats(*statistics_and_target)
            target = statistics_and_target[-1].reshape(-1)
            size = max(-(-self.number // 3), 1)
            parts = [slice(start, start + size) for start in range(0, max(self.number, 1), size)]

            def value_of(part: slice) -> Tensor:  # copies: fn may write to what it gets
                fields_of_part = {name: field[part].clone() for name, field in fields.items()}
                return self._call(fields_of_part, [row[part].clone() for row in rows], target[part])

            joint, separate = value_of(slice(None)), torch.cat([value_of(part) for part in parts])
            differ = ~torch.isclose(joint, separate, rtol=1e-4, atol=1e-6, equal_nan=True)
            differ &= is_counted(target, self.ignore_index)
            if bool(differ.any()):
                token = int(differ.nonzero()[0])
                raise ValueError(
                    f"fn gives token {token} {float(joint[token])} beside all tokens, but {float(separate[token])} "
                    f"beside {size} of them: it must not mix tokens, since it is called a chunk at a time. "
                    f"{self.instead}"
                )


def _checked_rows(rows: Any, target: Tensor, instead: str) -> list[Tensor]:
    if isinstance(rows, Tensor) or not isinstance(rows, (tuple, list)):
        hint = ": for one tensor pass rows=(tensor,)" if isinstance(rows, Tensor) else ""
        raise TypeError(
            f"rows must be a tuple of tensors, got {repr_for_message(rows) if not hint else 'a tensor'}{hint}"
        )
    for i, row in enumerate(rows):
        name = f"rows[{i}]"
        arguments.required(name, row)
        if not is_dtensor(target):
            refuse_beside_plain("the input is", **{name: row})
        if row.dim() < target.dim() or any(
            size != expected for size, expected in zip(row.shape, target.shape, strict=False)
        ):
            raise ValueError(
                f"{name} has shape {tuple(row.shape)}; expected {tuple(target.shape)} in front, the shape of the "
                "target and of the input's rows (one number a sequence: unsqueeze and expand it)"
            )
        if row.device != target.device:
            raise ValueError(
                f"{name} is on {row.device} but input and target are on {target.device}; all must be the same"
            )
        if row.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires grad, which would be lost: detach it. Where it should be learned, {instead}"
            )
    return [row.clone() for row in rows]  # for a function that writes to them
