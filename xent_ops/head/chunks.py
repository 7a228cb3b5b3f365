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

import torch
from torch import Tensor

from ..kernels import reductions, reference
from ..kernels.options import LossOptions
from .packing import ComputedRows

_ops = torch.ops.xent

Gradients = tuple[Tensor, Tensor, Tensor]  # of input, linear_weight, linear_bias


def as_rows(input: Tensor) -> Tensor:
    return input.reshape(math.prod(input.shape[:-1]), input.shape[-1])


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
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
            value = rows.unpack_rows(computed[i], fill)
            if ignored is not None:
                mask = ~reference.is_counted(target.reshape(-1), ignored)
                value = value.masked_fill(mask.view((-1, *(1,) * (value.dim() - 1))), fill)
            values[i] = value.view((*target.shape, *value.shape[1:]))
    return values


def skipped_values(with_argmax: bool, with_entropy: bool) -> tuple[float | None, ...]:
    """The loss, lse, argmax and entropy of a skipped row. None: the statistic is not wanted."""
    return 0.0, math.inf, -1 if with_argmax else None, 0.0 if with_entropy else None


def in_dtype(gradients: Gradients, dtype: torch.dtype) -> Gradients:
    return gradients[0].to(dtype), gradients[1].to(dtype), gradients[2].to(dtype)


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


def divided_by(
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    classes: int,
    dtype: torch.dtype,
    loss: LossOptions,
    token_weight: Tensor | None = None,
) -> Tensor:
    """(2,): the divisors of a reduced loss and of its z-loss."""
    ignore_index = loss.row_options.ignore_index
    if loss.reduction == "mean":
        weights = reductions.target_weights(target, weight, classes, ignore_index, dtype)
        return reductions.divisor_of(weights, target, ignore_index, token_weight)
    if divisor is None:
        return target.new_ones(2, dtype=dtype)
    return divisor.to(dtype).expand(2).contiguous()


def factors(inverse: Tensor, token_weight: Tensor | None, lse_square_scale: float) -> tuple[Tensor, Tensor | None]:
    """Factors of the gradients of losses and of lse^2, () or one per row. ``inverse`` (2,): one over the divisors."""
    row_factors = inverse if token_weight is None else inverse.unsqueeze(-1) * token_weight
    return row_factors[0], None if lse_square_scale == 0.0 else lse_square_scale * row_factors[1]
