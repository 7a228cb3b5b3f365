"""Functions that all losses from hidden states share. ``run`` in products.py is their loop over chunks of rows.

The logits of only one chunk exist at a time. Their memory is allocated once per call:

    logits = input @ linear_weight.T + linear_bias
    statistics of the logits, their gradient written over them, or both in one pass
    grad_input = gradient @ linear_weight;  grad_linear_weight += gradient.T @ input;  grad_linear_bias += its sum

The same formulas give the gradients for a slice of the classes. All classes are one slice that starts at class 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import reductions, reference
from ..kernels.options import LossOptions
from . import float16
from .packing import ComputedRows

_ops = torch.ops.xent


class HeadGradients(NamedTuple):
    """Gradients of the input, (..., H), the weight and the bias, or (0,) if not wanted."""

    input: Tensor
    weight: Tensor
    bias: Tensor


def as_rows(input: Tensor) -> Tensor:
    return input if input.dim() == 2 else input.reshape(math.prod(input.shape[:-1]), input.shape[-1])


def linear_scale_grad(grad: Tensor, factor: Tensor) -> Tensor:
    """grad times factor, a tensor ()."""
    grad = grad.clone(memory_format=torch.contiguous_format)
    _ops.scale_grad_(grad, factor)
    return grad


def unpack_statistics(
    rows: ComputedRows, computed: Sequence[Tensor], fills: Sequence[float | None], target: Tensor, ignored: int | None
) -> list[Tensor]:
    """Spread statistics of the computed rows over all rows, (..., *). A statistic that is not wanted is (0,).

    ``fills``: the value for skipped rows, or None if the statistic is not wanted. With an ignore_index, ignored rows
    that were computed get this value too.
    """
    values = list(computed)
    for i, fill in enumerate(fills):
        if fill is not None:
            value = rows.unpack(computed[i], fill)
            if ignored is not None:
                mask = ~reference.is_counted(target.reshape(-1), ignored)
                value = value.masked_fill(mask.view((-1, *(1,) * (value.dim() - 1))), fill)
            values[i] = value if target.dim() == 1 else value.view((*target.shape, *value.shape[1:]))
    return values


def skipped_values(with_argmax: bool, with_entropy: bool) -> tuple[float | None, ...]:
    """The loss, lse, argmax and entropy of a skipped row. None: the statistic is not wanted."""
    return 0.0, math.inf, -1 if with_argmax else None, 0.0 if with_entropy else None


def no_gradients(input: Tensor, linear_weight: Tensor, output_mask: Sequence[bool]) -> HeadGradients:
    """Those of a slice without classes: zeros."""
    shapes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
    zeros = [input.new_zeros(shape if needed else 0) for shape, needed in zip(shapes, output_mask, strict=True)]
    return HeadGradients(*zeros)


def in_dtype(gradients: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> HeadGradients:
    return HeadGradients(*(gradient if gradient.dtype == dtype else gradient.to(dtype) for gradient in gradients))


def classes_of(
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    class_start: int,
    num_classes: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """The three tensors without the padding rows, and the number of padding rows."""
    if num_classes is None:
        return linear_weight, linear_bias, weight, 0
    columns = reference.columns_of(linear_weight.shape[0], class_start, num_classes)
    bias, class_weight = (None if tensor is None else tensor[:columns] for tensor in (linear_bias, weight))
    return linear_weight[:columns], bias, class_weight, linear_weight.shape[0] - columns


def divisors_and_factors(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    divisor: Tensor | None,
    loss: LossOptions,
) -> tuple[Tensor, tuple[Tensor, Tensor | None], Tensor | None]:
    """(divisors of a reduced loss, (2,); factors of the gradients of losses and of lse^2; ``Split.shares`` of float16).

    The factors are (), or with token weights or shares one for each row.
    """
    dtype = None if input.dtype != torch.float64 else input.dtype
    row_args = (target, weight, token_weight, divisor)
    divisors, scale, square = _ops.row_divisors(*row_args, dtype=dtype, **loss.reduction_keywords())
    if input.dtype == torch.float16:
        split = float16.split_loss(input.dtype, divisors, target, token_weight, weight, loss)
        return divisors, reductions.row_factors(split.divisors, target, split.token_weight, loss), split.shares
    return divisors, (scale, None if loss.lse_square_scale == 0.0 else square), None
