"""The loop over chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels import reference
from ...kernels.options import Chunking
from ...kernels.sizes import symbolic, traced
from ..chunks import Gradients
from ..products import accumulator_of_weight
from ..sizes import rows_of_chunk

# From a chunk's logits and the numbers that its rows came with to more numbers of its rows. Where products are wanted,
# the gradient of the logits is the last.
OfRows = Callable[..., Sequence[Tensor]]


class Loop:
    """Rows of input (N, H), a head, and the products that are wanted."""

    def __init__(
        self,
        input: Tensor,
        head: Tensor,
        bias: Tensor | None,
        how: Chunking,
        mask: Sequence[bool] = (False, False, False),
        accumulate_dtype: torch.dtype | None = None,
    ) -> None:
        if how.products is not None:
            raise NotImplementedError(f"products={how.products!r} cannot be exported: core aten has no such products")
        self.input, self.head, self.bias, self.mask, self.dtype = input, head, bias, mask, how.logits_dtype
        self.sums = accumulator_of_weight(input.dtype, accumulate_dtype)
        self.starts, self.size = _starts(input, head, how)
        self.of_input: list[Tensor] = []
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None

    def __call__(self, of_rows: OfRows, *values: Tensor | None) -> list[Tensor]:
        made = []
        for start in self.starts:
            x = self._part(self.input, start)
            logits = logits_of(x, self.head, self.bias, self.dtype)
            numbers = of_rows(logits, *(None if value is None else self._part(value, start) for value in values))
            if any(self.mask):
                *numbers, gradient = numbers
                self._add(x, gradient.to(x.dtype))
            made.append(numbers)
        return [_joined(parts) for parts in zip(*made, strict=True)]

    def _part(self, values: Tensor, start: int) -> Tensor:
        return values if len(self.starts) == 1 else values[start : start + self.size]

    def _add(self, x: Tensor, gradient: Tensor) -> None:
        if self.mask[0]:
            self.of_input.append(torch.mm(gradient, self.head))
        if self.mask[1]:
            part = torch.mm(gradient.t().to(self.sums), x.to(self.sums))
            self.of_weight = part if self.of_weight is None else self.of_weight + part
        if self.mask[2]:
            rows = gradient.sum(0, dtype=reference.accumulator(x))
            self.of_bias = rows if self.of_bias is None else self.of_bias + rows

    def gradients(self, shape: torch.Size, padding: int = 0) -> Gradients:
        """Of the input, of this shape, the weight and the bias, as they were added up, with zeros for the padding."""
        none = self.input.new_empty(0)
        weight, bias = none.to(self.sums), none.to(reference.accumulator(none))
        if self.of_weight is not None:
            weight = torch.nn.functional.pad(self.of_weight, (0, 0, 0, padding)) if padding else self.of_weight
        if self.of_bias is not None:
            bias = torch.nn.functional.pad(self.of_bias, (0, padding)) if padding else self.of_bias
        return _joined(self.of_input).view(shape) if self.mask[0] else none, weight, bias


def _starts(input: Tensor, head: Tensor, how: Chunking) -> tuple[Sequence[int], int]:
    """Where chunks start, and how many rows one has."""
    number = input.shape[0]
    if symbolic(number) or symbolic(how.chunk_rows):
        return (0,), number
    size = rows_of_chunk(number, input, traced(head.shape[0]), False, how.chunk_rows, how.logits_dtype)
    return range(0, max(number, 1), size), size


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def logits_of(input: Tensor, head: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    if dtype not in (None, input.dtype):
        input, head, bias = input.to(dtype), head.to(dtype), None if bias is None else bias.to(dtype)
    return torch.mm(input, head.t()) if bias is None else torch.addmm(bias, input, head.t())


def times(made: Gradients, factor: Tensor | None, dtype: torch.dtype) -> Gradients:
    if factor is not None:
        made = tuple(reference.scaled_grad(gradient, factor) for gradient in made)  # type: ignore[assignment]
    return made[0].to(dtype), made[1].to(dtype), made[2].to(dtype)


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """A copy in any case: the result of an operator is none of its arguments."""
    return reference.scaled_grad(grad, factor).contiguous()
