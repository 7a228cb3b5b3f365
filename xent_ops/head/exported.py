"""What the linear operators compute, written to no memory that exists: for exporters, whose graphs have none.

The formulas are those of chunks.py, ids.py and shard.py. Chunks are a graph's nodes here, so a known number of rows is
unrolled, and a symbolic one is one chunk: its memory is the exporter's. Ignored rows are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reductions, reference, reference_distillation, reference_ids
from ..kernels.distillation import Distillation
from ..kernels.options import DEFAULTS, Chunking, LossOptions, Options
from ..kernels.sizes import symbolic, traced
from . import chunks, distillation_shard, float16, shard
from . import ids as of_ids
from .chunks import Gradients, as_rows, classes_of
from .products import accumulator_of_weight
from .sizes import padded_classes, rows_of_chunk

# From a chunk's logits and the numbers that its rows came with to more numbers of its rows. Where products are wanted,
# the gradient of the logits is the last.
OfRows = Callable[..., Sequence[Tensor]]


class _Loop:
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


def statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> tuple[Tensor, ...]:
    how, wanted = Chunking(**chunking), (True, True, with_argmax, with_entropy)

    def of_rows(logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        return reference.statistics(logits, target, weight, with_argmax, with_entropy, options=options)

    made = _Loop(as_rows(input), linear_weight, linear_bias, how)(of_rows, target.reshape(-1))
    return tuple(_of_shape(made, target, wanted, how, options))


def _of_shape(
    made: Sequence[Tensor], target: Tensor, wanted: Sequence[bool], how: Chunking, options: Options
) -> list[Tensor]:
    values = [value.view(target.shape) if want else value for value, want in zip(made, wanted, strict=True)]
    return chunks.without_ignored(values, wanted, target, options) if how.skip_ignored else values


def gradients(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    coefficient: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> Gradients:
    head, bias, weight, padding = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    upstream = reference.row_grads(
        grad_loss, grad_lse, target, lse, divisor, options.ignore_index, lse_square_scale, lse.dtype
    )
    values = (*upstream, grad_entropy, lse, entropy, coefficient)
    a, b, c, z, h, coefficients = (None if value is None else value.reshape(-1) for value in values)
    indices, factor = target.reshape(-1), None
    if input.dtype == torch.float16:
        factor = float16.largest(indices, weight, coefficients, head.shape[0], options, a, b, c)
        a, b, c = (None if value is None else value / factor for value in (a, b, c))

    def of_rows(
        logits: Tensor, target: Tensor, a: Tensor, b: Any, c: Any, z: Tensor, h: Any, k: Any
    ) -> Sequence[Tensor]:
        rest = (weight, None, c, h, k, class_start, num_classes)
        return (reference.cross_entropy_backward(a, b, logits, target, z, *rest, options=options),)

    loop = _Loop(as_rows(input), head, bias, Chunking(**chunking), output_mask, accumulate_dtype)
    if any(output_mask):
        loop(of_rows, indices, a, b, c, z, h, coefficients)
    return _times(loop.gradients(input.shape, padding), factor, input.dtype)


def _times(made: Gradients, factor: Tensor | None, dtype: torch.dtype) -> Gradients:
    if factor is not None:
        made = tuple(reference.scaled_grad(gradient, factor) for gradient in made)  # type: ignore[assignment]
    return made[0].to(dtype), made[1].to(dtype), made[2].to(dtype)


def with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    token_weight: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    with_argmax: bool = False,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    **chunking: Any,
) -> tuple[Tensor, ...]:
    loss, dtype = LossOptions(options, lse_square_scale, reduction), reference.accumulator(input)
    divisors = chunks.divided_by(target, weight, divisor, linear_weight.shape[0], dtype, loss, token_weight)
    inverse = float16.split_divisors(input.dtype, divisors)[0].reciprocal()
    of_tokens = None if token_weight is None else token_weight.to(dtype).reshape(-1)
    flat, indices = as_rows(input), target.reshape(-1)
    factors = chunks.factors(inverse, of_tokens, lse_square_scale)
    scale, square = (None if factor is None else factor.expand(indices.shape) for factor in factors)

    def of_rows(logits: Tensor, target: Tensor, scale: Tensor, square: Any) -> Sequence[Tensor]:
        wanted = (with_argmax, with_entropy)
        return reference.cross_entropy_with_grad(logits, target, scale, square, weight, *wanted, options=options)

    how = Chunking(**chunking)
    loop = _Loop(flat, linear_weight, linear_bias, how, output_mask, accumulate_dtype)
    made = loop(of_rows, indices, scale, square)[:4]
    statistics = _of_shape(made, target, (True, True, with_argmax, with_entropy), how, options)
    row_loss, lse, *_ = statistics
    value = reductions.reduce_rows(row_loss, lse, target, divisors, loss._replace(reduction="mean"), token_weight).value
    return value, divisors, *statistics, *loop.gradients(input.shape)


def distillation_losses(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    def of_rows(logits: Tensor, target: Tensor, teacher: Tensor) -> Sequence[Tensor]:
        teacher_logits = logits_of(teacher, teacher_weight, teacher_bias)
        loss, statistics = reference_distillation.distillation_forward(logits, teacher_logits, target, **given)
        return loss, *statistics.unbind()

    loop = _Loop(as_rows(input), linear_weight, linear_bias, Chunking(chunk_rows, skip_ignored))
    loss, *statistics = loop(of_rows, target.reshape(-1), as_rows(teacher_input))
    if skip_ignored:
        ignored = ~reference.is_counted(target, Distillation(**given).options.ignore_index).reshape(-1)
        statistics = [values.masked_fill(ignored, 0.0) for values in statistics]
    return loss.view(target.shape), torch.stack(statistics).view(len(statistics), *target.shape)


def distillation_gradients(
    grad_loss: Tensor,
    statistics: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    **given: Any,
) -> Gradients:
    indices, how = target.reshape(-1), Distillation(**given)
    upstream, factor = grad_loss.to(reference.accumulator(input)).expand(target.shape).reshape(-1), None
    if input.dtype == torch.float16:
        factor = float16.largest(indices, None, None, linear_weight.shape[0], how.options, upstream)
        upstream = upstream / factor

    def of_rows(
        logits: Tensor, target: Tensor, teacher: Tensor, upstream: Tensor, statistics: Tensor
    ) -> Sequence[Tensor]:
        rows = (logits_of(teacher, teacher_weight, teacher_bias), target, statistics.t())
        return (reference_distillation.distillation_backward(upstream, logits, *rows, **given),)

    chunking = Chunking(chunk_rows, skip_ignored)
    loop = _Loop(as_rows(input), linear_weight, linear_bias, chunking, output_mask, accumulate_dtype)
    if any(output_mask):
        loop(of_rows, indices, as_rows(teacher_input), upstream, statistics.reshape(len(statistics), -1).t())
    return _times(loop.gradients(input.shape), factor, input.dtype)


def distillation_with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divisor: Tensor | None = None,
    token_weight: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    *,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    **given: Any,
) -> tuple[Tensor, ...]:
    dtype, options = reference.accumulator(input), Distillation(**given).options
    loss = LossOptions(Options(options.ignore_index), reduction=reduction)
    divisors = chunks.divided_by(target, None, divisor, linear_weight.shape[0], dtype, loss, token_weight)
    inverse = float16.split_divisors(input.dtype, divisors)[0][0].reciprocal()
    indices = target.reshape(-1)
    factors = inverse.expand(indices.shape) if token_weight is None else inverse * token_weight.to(dtype).reshape(-1)

    def of_rows(logits: Tensor, target: Tensor, teacher: Tensor, factor: Tensor) -> Sequence[Tensor]:
        teacher_logits = logits_of(teacher, teacher_weight, teacher_bias)
        return reference_distillation.distillation_with_grad(logits, teacher_logits, target, factor, **given)

    how = Chunking(chunk_rows, skip_ignored)
    loop = _Loop(as_rows(input), linear_weight, linear_bias, how, output_mask, accumulate_dtype)
    row_loss = loop(of_rows, indices, as_rows(teacher_input), factors)[0].view(target.shape)
    mean = loss._replace(reduction="mean")
    value = reductions.reduce_rows(row_loss, row_loss, target, divisors, mean, token_weight).value
    return value, divisors, *loop.gradients(input.shape)


def token_logits(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None = None,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> tuple[Tensor, ...]:
    how, rows = Chunking(**chunking), ids.shape[:-1]

    def of_rows(logits: Tensor, places: Tensor) -> Sequence[Tensor]:
        return of_ids.statistics_of_rows(logits, places, with_entropy, options=options)

    flat = ids.reshape(math.prod(rows), ids.shape[-1])
    at_ids, lse, entropy = _Loop(as_rows(input), linear_weight, linear_bias, how)(of_rows, flat)
    if how.skip_ignored:
        ignored = ~reference.is_counted(ids, options.ignore_index).any(-1).reshape(-1)
        at_ids, lse = at_ids.masked_fill(ignored.unsqueeze(-1), 0.0), lse.masked_fill(ignored, math.inf)
        entropy = entropy.masked_fill(ignored, 0.0) if with_entropy else entropy
    return at_ids.view(ids.shape), lse.view(rows), entropy.view(rows) if with_entropy else entropy


def token_logits_gradients(
    grad_ids: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    at_ids: Tensor,
    lse: Tensor,
    linear_bias: Tensor | None = None,
    entropy: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> Gradients:
    shape = (math.prod(ids.shape[:-1]), ids.shape[-1])
    places, upstream, x = (value.reshape(shape) for value in (ids, grad_ids.to(lse.dtype), at_ids))
    values = (grad_lse, grad_entropy, lse, entropy)
    b, c, z, h = (None if value is None else value.reshape(-1) for value in values)
    factor = None
    if input.dtype == torch.float16:
        target = reference_ids.first_counted(places, options.ignore_index)
        magnitudes = (upstream.abs().amax(-1), b, c)
        factor = float16.largest(target, None, None, linear_weight.shape[0], options, *magnitudes)
        upstream = upstream / factor
        b, c = (None if value is None else value / factor for value in (b, c))

    def of_rows(
        logits: Tensor, a: Tensor, ids: Tensor, x: Tensor, b: Any, c: Any, z: Tensor, h: Any
    ) -> Sequence[Tensor]:
        return (of_ids.gradient(a, b, c, logits, ids, x, z, h, options=options, out_of_place=True),)

    loop = _Loop(as_rows(input), linear_weight, linear_bias, Chunking(**chunking), output_mask, accumulate_dtype)
    if any(output_mask):
        loop(of_rows, upstream, places, x, b, c, z, h)
    return _times(loop.gradients(input.shape), factor, input.dtype)


def token_logits_with_grad(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    grad_log_probs: Tensor,
    grad_lse_square: Tensor | None = None,
    linear_bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    *,
    options: Options = DEFAULTS,
    **chunking: Any,
) -> tuple[Tensor, ...]:
    shape, how = (math.prod(ids.shape[:-1]), ids.shape[-1]), Chunking(**chunking)
    upstream = torch.where(reference.is_counted(ids, options.ignore_index), grad_log_probs, 0.0).reshape(shape)
    squares = None if grad_lse_square is None else grad_lse_square.reshape(-1)

    def of_rows(logits: Tensor, places: Tensor, upstream: Tensor, square: Any) -> Sequence[Tensor]:
        at_ids, lse, _ = of_ids.statistics_of_rows(logits, places, options=options)
        target = reference_ids.first_counted(places, options.ignore_index)
        lse = reference.infinite_where_ignored(lse, target, options.ignore_index)
        of_square = reference.grad_lse_of_square(square, lse, target, options.ignore_index)
        total = -upstream.sum(-1) if of_square is None else of_square - upstream.sum(-1)
        given = (upstream, total, None, logits, places, at_ids, lse)
        return at_ids, lse, of_ids.gradient(*given, options=options, out_of_place=True)

    loop = _Loop(as_rows(input), linear_weight, linear_bias, how, output_mask, accumulate_dtype)
    at_ids, lse = loop(of_rows, ids.reshape(shape), upstream, squares)[:2]
    return at_ids.view(ids.shape), lse.view(ids.shape[:-1]), *loop.gradients(input.shape)


def token_logits_gradient_of_rows(*args: Any, **keywords: Any) -> Tensor:
    """Of given logits."""
    return of_ids.gradient(*args, out_of_place=True, **keywords)


def stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    **chunking: Any,
) -> Tensor:
    """Of one rank's rows of the head."""
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)

    def of_rows(logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        return shard.numbers(logits, target, class_start, num_classes, weight, entropy, options)

    made = _Loop(as_rows(input), head, bias, Chunking(**chunking))(of_rows, target.reshape(-1))
    return shard.handed_over(made, class_start, len(head), weight, entropy)


def chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int = 0,
    num_classes: int | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    entropy: bool = False,
    count: Tensor | None = None,
    after: Tensor | None = None,
    ids: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    *,
    options: Options = DEFAULTS,
) -> tuple[Tensor, Tensor]:
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    logits = logits_of(input, head, bias, logits_dtype)
    behind = padded_classes(head.shape[0], logits.dtype) - head.shape[0]
    given = (target, class_start, num_classes, weight, entropy, ids, options)
    return shard.statistics_of_chunk(logits, *given), torch.nn.functional.pad(logits, (0, behind))


def distillation_chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    class_start: int,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    after: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    how, made = Distillation(**given), []
    for rows, weight, bias in ((input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)):
        head, bias, _, _ = classes_of(weight, bias, None, class_start, how.num_classes)
        made.append(logits_of(rows, head, bias))
    stats = distillation_shard.statistics_of_chunk(made[0], made[1], target, class_start, how)
    behind = [padded_classes(logits.shape[1], logits.dtype) - logits.shape[1] for logits in made]
    padded = [torch.nn.functional.pad(logits, (0, more)) for logits, more in zip(made, behind, strict=True)]
    return stats, padded[0], padded[1]


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """A copy in any case: the result of an operator is none of its arguments."""
    return reference.scaled_grad(grad, factor).contiguous()
