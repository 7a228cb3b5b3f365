"""Matrix multiplications of 8-bit numbers in plain torch, rounded as on a GPU and multiplied in float32.

e4m3 has 4 bits of exponent and 3 of mantissa: 2^-9 to 448, and no infinity. A matrix has one scale, its largest
magnitude over 448. The gradient of the logits has one scale per row, from a bound instead of a search. With A, B and C
as in reference.cross_entropy_backward, no element of a row is larger than

    bound = logit_scale (max(|A|, |B|, |A - B|) + |C| max w + |grad_entropy| max(1/e, log V))

So rows may differ by any factor. Weights and inputs are rounded to nearest. The gradient is rounded up or down at
random, so that its mean is right. Rounding to nearest would turn all elements below 2.2e-6 of a row's bound into zeros,
and most classes are below it. The random bits are a hash of the row's lse, its number and the class, so equal calls
give equal bits. The hash's constants are from Knuth and from Chris Wellons' lowbias32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .options import RowOptions

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_NORMAL = 2.0**-6
_WORD = 0xFFFFFFFF


class GradientRows(NamedTuple):
    """The numbers that the gradients of rows are computed from, (n,) each."""

    total: Tensor  # A, B and C, float32
    at_target: Tensor
    by_class: Tensor
    lse: Tensor
    entropy: Tensor | None
    grad_entropy: Tensor | None
    bound: Tensor  # float32
    column: Tensor  # of the target, int64; -1 for none
    seed: Tensor  # int32


def gradient_rows(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,  # in the dtype of lse
    divisors: None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    lse_coefficient: Tensor | None = None,
    class_start: int = 0,
    num_classes: int | None = None,
    grad_dtype: torch.dtype | None = None,
    lse_low: Tensor | None = None,
    *,
    options: RowOptions,
    first_row: int = 0,
) -> GradientRows:
    """Arguments as for reference.cross_entropy_backward. ``first_row``: the number of the first of these rows.

    ``divisors`` are applied before, and ``grad_dtype`` is not read.
    """
    width = logits.shape[1]
    classes = width if num_classes is None else num_classes
    total, b, c, _ = reference.gradient_coefficients(
        grad_loss.expand(lse.shape), grad_lse, target, classes, weight, lse_coefficient, options, lse.dtype
    )
    counted = reference.is_counted(target, options.ignore_index)
    local = torch.where(counted, target.to(torch.int64) - class_start, -1)
    column = torch.where((local >= 0) & (local < width), local, -1)
    if weight is not None and lse_coefficient is not None:
        b = b * torch.where(column >= 0, reference.weights_at(weight, column.clamp_min(0)), 0.0)
    bound = torch.maximum(torch.maximum(total.abs(), b.abs()), (total - b).abs())
    if options.label_smoothing > 0.0:
        bound = bound + c.abs() * (1.0 if weight is None else weight.abs().amax())
    if grad_entropy is not None:
        grad_entropy = torch.where(counted, grad_entropy.to(lse.dtype), 0.0)
        bound = bound + grad_entropy.abs() * max(1 / math.e, math.log(classes))
    total, entropy, grad_entropy = reference.fold_low(lse_low, total, entropy, grad_entropy)
    number = torch.arange(first_row, first_row + lse.shape[0], device=lse.device)
    seed = lse.view(torch.int32) ^ ((number * 0x85EBCA6B) & 0x7FFFFFFF).to(torch.int32)
    return GradientRows(total, b, c, lse, entropy, grad_entropy, bound * abs(options.logit_scale), column, seed)


def scale_of(largest: Tensor) -> Tensor:
    """The scale, (): numbers of this largest magnitude are divided by it."""
    return torch.where(largest == 0.0, 1.0, largest.to(torch.float32) / LARGEST)


def quantize(
    values: Tensor,  # (R, C)
    scale: Tensor,  # ()
    factor: Tensor | None = None,  # (R,): the rows are multiplied by it
    rows: Tensor | None = None,  # written: at least (R, C)
    transposed: Tensor | None = None,  # written: at least (C, R)
) -> None:
    """Round to nearest. The memory of ``rows`` and ``transposed`` behind the values is filled with zeros."""
    floats = values.to(torch.float32)
    if factor is not None:
        floats = floats * factor.unsqueeze(1)
    rounded = (floats / scale).clamp(-LARGEST, LARGEST).to(DTYPE)
    if rows is not None:
        _fill(rows, rounded)
    if transposed is not None:
        _fill(transposed, rounded.t())


def _fill(out: Tensor, values: Tensor) -> None:
    out.view(torch.uint8).zero_()  # zero in 8 bits; torch 2.11 cannot fill a float8 tensor on a CPU
    out[: values.shape[0], : values.shape[1]].copy_(values)


def gradient(
    logits: Tensor,  # (n, width)
    row_values: GradientRows,
    weight: Tensor | None,  # (width,), float32
    options: RowOptions,
    rows: Tensor | None,  # written: (n, at least width), zeros behind it
    transposed: Tensor | None,  # written: (at least width, n)
) -> None:
    """The gradient of the logits over bound, times 448."""
    x, classes = reference.activation(logits, options), logits.shape[1]
    grad = reference.softmax_gradient(x, row_values.lse, row_values.total, row_values.entropy, row_values.grad_entropy)
    column = torch.arange(classes, device=logits.device)
    grad = grad - torch.where(column == row_values.column.unsqueeze(1), row_values.at_target.unsqueeze(1), 0.0)
    if options.label_smoothing > 0.0:
        by_class = row_values.by_class.unsqueeze(1)
        grad = grad - (by_class if weight is None else by_class * weight)
    grad = grad * reference.activation_derivative(x, options)
    bound = row_values.bound.unsqueeze(1)
    grad = torch.where(bound == 0.0, 0.0, grad * (LARGEST / bound))
    grad = round_at_random(grad, random_bits(column, row_values.seed.unsqueeze(1))).to(DTYPE)
    if rows is not None:
        _fill(rows, grad)
    if transposed is not None:
        transposed[:classes].copy_(grad.t())


def random_bits(column: Tensor, seed: Tensor) -> Tensor:
    """The upper 16 of 20 bits, int32. Two columns use one hash."""
    mixed = (column // 2 * 0x9E3779B1 + seed.to(torch.int64)) & _WORD
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & _WORD
    mixed = mixed ^ (mixed >> 15)
    return (torch.where(column % 2 == 0, mixed & 0xFFFF, mixed >> 16) << 4).to(torch.int32)


def round_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to e4m3 at random: add random bits below the third bit of the mantissa, then truncate there.

    Below 2^-6 the numbers of e4m3 are as far apart as between 2^-6 and 2^-5: there 2^-6 is added before the rounding.
    """
    size = values.abs()
    higher = (size < LEAST_NORMAL).to(size.dtype) * LEAST_NORMAL
    cut = (((size + higher).view(torch.int32) + bits) & -(2**20)).view(torch.float32) - higher
    return torch.where(values.isnan(), values, torch.copysign(cut.clamp_max(LARGEST), values))


def product(left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, out: Tensor) -> None:
    """out (M, N) = scale_left * left (M, K) @ scale_right * right (N, K).T, added up in float32."""
    out.copy_(torch.mm(left.to(torch.float32), right.to(torch.float32).t()) * (scale_left * scale_right))
