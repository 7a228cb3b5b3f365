"""Batching rules (vmap) of the operators for class indices: a batch is more rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.options import as_record
from ..kernels.reductions import target_weights, z_losses
from ..kernels.reference import is_counted, row_grads


def _to_front(tensor: Tensor | None, dim: int | None, size: int) -> Any:
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _batched(info: Any, in_dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Any]:
    return [_to_front(tensor, dim, info.batch_size) for tensor, dim in zip(tensors, in_dims, strict=False)]


def _same_for_all(in_dims: Sequence[int | None], position: int) -> None:
    if len(in_dims) > position and in_dims[position] is not None:
        raise NotImplementedError("vmap over the class weight of xent_ops.cross_entropy is not supported")


def forward(
    info: Any, in_dims: tuple[Any, ...], logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
) -> tuple[Any, tuple[int, int]]:
    _same_for_all(in_dims, 2)
    logits, target = _batched(info, in_dims, (logits, target))
    return torch.ops.xent.cross_entropy_forward(logits, target, weight, **options), (0, 0)


def reduced(
    info: Any,
    in_dims: tuple[Any, ...],
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    **options: Any,
) -> tuple[Any, tuple[int, int, int]]:
    """Rows of all samples by one operator, then a reduction for each sample."""
    _same_for_all(in_dims, 2)
    logits, target = _batched(info, in_dims, (logits, target))
    loss, lse = torch.ops.xent.cross_entropy_forward(logits, target, weight, **options)
    ignore_index = as_record(options)["options"].ignore_index
    weights = target_weights(target, weight, logits.shape[-1], ignore_index, loss.dtype)
    counted = is_counted(target, ignore_index).to(loss.dtype)
    value, *divisor = [_sum_of_samples(rows) for rows in (loss, weights, counted)]
    square = None
    if lse_square_scale != 0.0:
        square = _sum_of_samples(z_losses(lse, target, ignore_index, lse_square_scale))
    if reduction == "mean":
        value = value / divisor[0]
        square = None if square is None else square / divisor[1]
    value = value if square is None else value + square
    return (value, torch.stack(divisor, -1), torch.where(counted != 0, lse, float("inf"))), (0, 0, 0)


def _sum_of_samples(rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], -1).sum(1)


def backward(
    info: Any,
    in_dims: tuple[Any, ...],
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    *,
    lse_square_scale: float = 0.0,
    **options: Any,
) -> tuple[Tensor, int]:
    """What each sample divides by becomes a part of its rows' gradients."""
    _same_for_all(in_dims, 5)
    grad_loss, grad_lse, logits, target, lse = _batched(info, in_dims, (grad_loss, grad_lse, logits, target, lse))
    grad_loss = grad_loss.reshape(grad_loss.shape + (1,) * (lse.dim() - grad_loss.dim()))
    if divisor is not None:
        sample_divisor = _to_front(divisor, in_dims[6], info.batch_size).movedim(-1, 0)
        divisor = sample_divisor.reshape(sample_divisor.shape + (1,) * (lse.dim() - 1))
    ignore_index = as_record(options)["options"].ignore_index
    grad_loss, grad_lse = row_grads(
        grad_loss, grad_lse, target, lse, divisor, ignore_index, lse_square_scale, lse.dtype
    )
    grad = torch.ops.xent.cross_entropy_backward(grad_loss, grad_lse, logits, target, lse, weight, **options)
    return grad, 0
