"""The kernels of one rank's rows of the head, by chunks of rows as in chunks.py and by the operators of ops/shard.py.

With entropies a rank hands over the lse l_r and the entropy H_r of its own columns, as statistics relative to p_r = l_r
(kernels/reference_shard.py), and the entropies after them. With the lse of all ranks::

    entropy = sum_r exp(l_r - lse) (H_r + lse - l_r)

A row's gradient on a rank that does not hold the target is that of its lse alone: there the target is an ignored one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import reference, reference_shard
from ...kernels.options import DEFAULTS, Options
from .. import checks
from .chunks import Gradients, _as_rows, _chunks, _divisible, _Products

_ops = torch.ops.xent
_HEADER = reference_shard.HEADER
_NOWHERE = -1  # the target of a row whose class is on another rank, or that is ignored


def width(rows: int, weighted: bool, entropy: bool) -> int:
    """How many numbers a rank hands over."""
    return reference_shard.width(rows, weighted) + (rows if entropy else 0)


def _head_of_classes(
    linear_weight: Tensor, linear_bias: Tensor | None, weight: Tensor | None, class_start: int, num_classes: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The three without the rows that are padding."""
    columns = min(linear_weight.shape[0], num_classes - class_start)
    bias, class_weight = (None if tensor is None else tensor[:columns] for tensor in (linear_bias, weight))
    return linear_weight[:columns], bias, class_weight


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
    chunk_rows: int | None = None,
) -> Tensor:
    flat, indices, keywords = _as_rows(input), target.reshape(-1), options.keywords()
    head, bias, weight = _head_of_classes(linear_weight, linear_bias, weight, class_start, num_classes)
    if entropy:
        return _with_entropies(flat, head, indices, bias, class_start, num_classes, options, chunk_rows)
    number, each = len(indices), reference_shard.width(1, weight is not None) - _HEADER
    made = input.new_empty((1, each * number + _HEADER), dtype=reference.accumulator(input))
    of_rows = made[0, : each * number].view(each, number)
    for rows, logits in _chunks(flat, head, bias, chunk_rows):
        part = _ops.cross_entropy_shard(logits, indices[rows], class_start, num_classes, weight, **keywords)[0]
        if rows.stop - rows.start == number:
            return part.unsqueeze(0)
        of_rows[:, rows] = part[:-_HEADER].view(each, rows.stop - rows.start)
        made[0, each * number :] = part[-_HEADER:]
    return made


def _with_entropies(
    flat: Tensor,
    head: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_start: int,
    num_classes: int,
    options: Options,
    chunk_rows: int | None,
) -> Tensor:
    dtype = reference.accumulator(flat)
    if flat.device.type == "cpu":  # elsewhere the join makes NaN of such a row
        checks.check_targets(target, num_classes, options.ignore_index)
    local, keywords = _local_target(target, class_start, len(head), options)
    of_rows = flat.new_empty((4, len(target)), dtype=dtype)  # lse, total relative to it, loss where the target is here
    of_rows[0], of_rows[1], of_rows[2:] = float("-inf"), 1.0, 0.0
    if len(head) > 0:
        for rows, logits in _chunks(flat, head, bias, chunk_rows):
            made = _ops.cross_entropy_forward_entropy(logits, local[rows], **keywords)
            of_rows[2, rows], of_rows[0, rows], of_rows[3, rows] = made
    header = reference_shard.header(class_start, len(head), flat.new_full((), len(head), dtype=dtype))
    return torch.cat([of_rows[:3].reshape(-1), header, of_rows[3]]).unsqueeze(0)


def _local_target(target: Tensor, class_start: int, columns: int, options: Options) -> tuple[Tensor, dict[str, Any]]:
    """The targets as columns of this rank, and the options of a row operator that takes them."""
    column = target.to(torch.int64) - class_start
    here = (column >= 0) & (column < columns) & (target.to(torch.int64) != options.ignore_index)
    return torch.where(here, column, _NOWHERE), options._replace(ignore_index=_NOWHERE).keywords()


def join(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    gathered_input: Tensor | None = None,
    entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    **_for_the_backward: Any,
) -> tuple[Tensor, ...]:
    # The join of rows reads no logits, only their shape.
    logits = input.new_empty(()).expand(*target.shape, linear_weight.shape[0])
    number = target.numel() if entropy else 0
    of_ranks = gathered[:, : gathered.shape[1] - number]
    shard = (of_ranks, class_start, num_classes, weight)
    outputs = _ops.cross_entropy_shard_join(logits, target, *shard, **options.keywords())
    if not entropy:
        return *outputs, gathered.new_empty(0)
    lse, of_rank = outputs[1].reshape(-1), gathered[:, :number]
    share = (of_rank - lse).exp()
    parts = torch.where(share == 0.0, 0.0, share * (gathered[:, gathered.shape[1] - number :] + lse - of_rank))
    return *outputs, parts.sum(0).view(target.shape)


def gradients(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    coefficient: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> Gradients:
    """As linear_cross_entropy_backward of chunks.py; grad_input is this rank's part of it."""
    grad_loss = grad_loss.to(lse.dtype).expand_as(target)
    values = (grad_loss, grad_lse, grad_entropy, target, lse, coefficient, entropy)
    rows_of = [None if value is None else value.reshape(-1) for value in values]
    factor = None
    if input.dtype == torch.float16:
        factor = _largest(*rows_of[:4], coefficient=rows_of[5], ignore_index=options.ignore_index)
        rows_of[:3] = [None if value is None else value / factor for value in rows_of[:3]]
    head, bias, weight = _head_of_classes(linear_weight, linear_bias, weight, class_start, num_classes)
    flat, keywords, shard = _as_rows(input), options.keywords(), (class_start, num_classes, weight)
    products = _Products(flat, head, output_mask, accumulate_dtype)
    for rows, logits in _chunks(flat, head, bias, chunk_rows, products.wider):
        a, b, c, indices, z, coefficients, h = [None if value is None else value[rows] for value in rows_of]
        if h is None:
            _ops.cross_entropy_shard_backward_(a, b, logits, indices, z, *shard, coefficients, **keywords)
        elif len(head) > 0:
            logits = _entropy_gradient(a, b, c, logits, indices, z, h, class_start, num_classes, options)
        products.add(rows, logits)
    if factor is not None:
        for gradient in (products.input, products.weight, products.bias):
            _ops.scale_grad_(gradient, factor)
    padding = len(linear_weight) - len(head)
    grad_weight, grad_bias = (
        torch.cat([gradient, gradient.new_zeros(padding, *gradient.shape[1:])]) if padding and wanted else gradient
        for gradient, wanted in zip(
            (products.weight.to(input.dtype), products.bias.to(input.dtype)), output_mask[1:], strict=True
        )
    )
    return products.grad_input(input), grad_weight, grad_bias


def _entropy_gradient(
    grad_loss: Any,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Any,
    lse: Any,
    entropy: Tensor,
    class_start: int,
    num_classes: int,
    options: Options,
) -> Tensor:
    local, keywords = _local_target(target, class_start, logits.shape[-1], options)
    target = target.to(torch.int64)
    counted, valid = target != options.ignore_index, (target >= 0) & (target < num_classes)
    elsewhere = torch.where(counted & (local == _NOWHERE), torch.where(valid, grad_loss, float("nan")), 0.0)
    grad_lse = elsewhere if grad_lse is None else grad_lse.to(elsewhere.dtype) + elsewhere
    rows = (logits, local, lse, entropy)
    return _ops.cross_entropy_backward_entropy(grad_loss, grad_lse, grad_entropy, *rows, **keywords)


def _largest(grad_loss: Any, *others: Any, coefficient: Tensor | None, ignore_index: int) -> Tensor:
    """As of chunks.py. Where weights are not negative, the coefficient is at least what any column is multiplied by.

    ``others``: the gradients of lse and entropy, then the target.
    """
    *grads, target = others
    masses = torch.where(target.to(torch.int64) != ignore_index, grad_loss, 0.0)
    if coefficient is not None:
        masses = masses * coefficient
    rows = [masses, *(grad for grad in grads if grad is not None)]
    return _divisible(torch.cat([masses.new_zeros(1), *rows]).abs().max())
