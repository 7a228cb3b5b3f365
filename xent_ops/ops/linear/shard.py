"""Linear cross entropy of one rank's rows of the head: its statistics, the join of all ranks', its gradients.

No operator communicates. The caller's all-gather (distributed/linear.py) stands between ``linear_cross_entropy_shard``,
which is called on detached tensors, and ``linear_cross_entropy_shard_join``, which carries the gradient. The join's
formula makes the logits again, since they are gone. There grad_input is this rank's part of a sum over ranks, which the
formula asks of torch's functional collectives: a node of the backward graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...kernels import reference, reference_shard
from ...kernels.options import DEFAULTS, Options
from .. import checks as row_checks
from ..library import Outputs, autograd, operator, save_nothing
from ..shard import check_coefficient, check_gathered
from . import checks
from .chunks import Gradients, _as_rows, _chunks, _divisible, _Products

_ops = torch.ops.xent


def _head_of_classes(
    linear_weight: Tensor, linear_bias: Tensor | None, weight: Tensor | None, class_start: int, num_classes: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The three without the rows that are padding."""
    columns = min(linear_weight.shape[0], num_classes - class_start)
    bias, class_weight = (None if tensor is None else tensor[:columns] for tensor in (linear_bias, weight))
    return linear_weight[:columns], bias, class_weight


def _shard(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    chunk_rows: int | None = None,
) -> Tensor:
    flat, indices, keywords = _as_rows(input), target.reshape(-1), options.keywords()
    head, bias, weight = _head_of_classes(linear_weight, linear_bias, weight, class_start, num_classes)
    number, each = len(indices), reference_shard.width(1, weight is not None) - reference_shard.HEADER
    stats = input.new_empty((1, each * number + reference_shard.HEADER), dtype=reference.accumulator(input))
    of_rows = stats[0, : each * number].view(each, number)
    for rows, logits in _chunks(flat, head, bias, chunk_rows):
        part = _ops.cross_entropy_shard(logits, indices[rows], class_start, num_classes, weight, **keywords)[0]
        if rows.stop - rows.start == number:
            return part.unsqueeze(0)
        of_rows[:, rows] = part[: -reference_shard.HEADER].view(each, rows.stop - rows.start)
        stats[0, each * number :] = part[-reference_shard.HEADER :]
    return stats


def _join(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    gathered_input: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    **_for_the_backward: Any,
) -> tuple[Tensor, ...]:
    # The join of rows reads no logits, only their shape.
    logits = input.new_empty(()).expand(*target.shape, linear_weight.shape[0])
    shard = (gathered, class_start, num_classes, weight)
    return _ops.cross_entropy_shard_join(logits, target, *shard, **options.keywords())


def _gradients(
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
    output_mask: Sequence[bool] = (True, True, True),
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> Gradients:
    """As linear_cross_entropy_backward of chunks.py; grad_input is this rank's part of it."""
    grad_loss = grad_loss.to(lse.dtype).expand_as(target)
    rows_of = [
        None if value is None else value.reshape(-1) for value in (grad_loss, grad_lse, target, lse, coefficient)
    ]
    factor = None
    if input.dtype == torch.float16:
        factor = _largest(*rows_of, ignore_index=options.ignore_index)
        rows_of[:2] = [None if value is None else value / factor for value in rows_of[:2]]
    head, bias, weight = _head_of_classes(linear_weight, linear_bias, weight, class_start, num_classes)
    flat, keywords = _as_rows(input), options.keywords()
    products = _Products(flat, head, output_mask, accumulate_dtype)
    for rows, logits in _chunks(flat, head, bias, chunk_rows, products.wider):
        a, b, indices, z, coefficients = [None if value is None else value[rows] for value in rows_of]
        shard = (class_start, num_classes, weight, coefficients)
        _ops.cross_entropy_shard_backward_(a, b, logits, indices, z, *shard, **keywords)
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


def _largest(
    grad_loss: Any, grad_lse: Any, target: Any, _lse: Any, coefficient: Tensor | None, *, ignore_index: int
) -> Tensor:
    """As of chunks.py. Where weights are not negative, the coefficient is at least what any column is multiplied by."""
    masses = torch.where(target.to(torch.int64) != ignore_index, grad_loss, 0.0)
    if coefficient is not None:
        masses = masses * coefficient
    rows = [masses] if grad_lse is None else [masses, grad_lse]
    return _divisible(torch.cat([masses.new_zeros(1), *rows]).abs().max())


def check_shard(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> None:
    checks.head(input, linear_weight, linear_bias, accumulate_dtype, chunk_rows, may_be_empty=True)
    row_checks.dtype("target", target, row_checks.INDICES)
    row_checks.same_shape("target", target.shape, input.shape[:-1], "one class index for each row of the input")
    row_checks.same_device("target", target, input, "input is")
    row_checks.row_options(weight, linear_weight.t(), options)
    row_checks.shard_range(linear_weight.shape[0], class_start, num_classes)


def _check_join(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    gathered_input: Tensor | None = None,
    *,
    group_name: str = "",
    **options: Any,
) -> None:
    rows = input if gathered_input is None else gathered_input
    check_shard(rows, linear_weight, target, class_start, num_classes, linear_bias, weight, **options)
    check_gathered(gathered, input, target, weight)
    if gathered_input is None:
        return
    expected = torch.Size((gathered_input.shape[0], *input.shape))
    row_checks.same_shape("gathered_input", gathered_input.shape, expected, "the inputs of all ranks")
    if not group_name:
        raise ValueError("gathered_input needs the group_name of the ranks that it was gathered from")


def _check_backward(
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
    output_mask: Sequence[bool] = (True, True, True),
    **options: Any,
) -> None:
    check_shard(input, linear_weight, target, class_start, num_classes, linear_bias, weight, **options)
    checks.gradient_mask(output_mask)
    check_coefficient(weight, coefficient)
    row_checks.rows_of(input, "input", grad_lse=grad_lse, lse=lse, coefficient=coefficient)
    row_checks.scalar_or_rows_of("input", input, grad_loss=grad_loss)


def _joined(input: Tensor, linear_weight: Tensor, target: Tensor, *_: Any) -> Outputs:
    return ((target.shape, reference.accumulator(input)),) * 4


def _stats(
    input: Tensor, _linear_weight: Tensor, target: Tensor, _start: int, _classes: int, *rest: Tensor | None
) -> Outputs:
    weighted = len(rest) > 1 and rest[1] is not None
    return (((1, reference_shard.width(target.numel(), weighted)), reference.accumulator(input)),)


def _gradient_shapes(*args: Any) -> Outputs:
    input, linear_weight = args[2:4]
    mask = args[11] if len(args) > 11 else (True, True, True)
    shapes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
    return tuple((shape if wanted else (0,), input.dtype) for shape, wanted in zip(shapes, mask, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    # torch leaves out arguments at the end that are at their defaults.
    input, linear_weight, target, _, *ctx.shard_range, linear_bias, weight, gathered_input = (*inputs, *(None,) * 3)[:9]
    needs_grad = (*ctx.needs_input_grad, *(False,) * 3)
    if needs_grad[7]:
        row_checks.weight_needs_grad()
    ctx.mask = [needs_grad[position] for position in (0, 1, 6)]
    _loss, lse, target_weight, coefficient = output
    ctx.mark_non_differentiable(target_weight, coefficient)
    ctx.set_materialize_grads(False)
    rows = input if gathered_input is None else gathered_input
    weighted = (weight, None if weight is None else coefficient)
    ctx.save_for_backward(rows, linear_weight, target, lse, linear_bias, *weighted)
    ctx.scattered = gathered_input is not None
    ctx.options = dict(keyword_only_inputs)
    ctx.group_name = ctx.options.pop("group_name", "")


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None and grad_lse is None:
        return (None,) * 9
    rows, linear_weight, target, lse, *rest = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(())
    head = (rows, linear_weight, target, lse, *ctx.shard_range, *rest)
    gradients = _ops.linear_cross_entropy_shard_backward(grad_loss, grad_lse, *head, ctx.mask, **ctx.options)
    total, grad_weight, grad_bias = (
        gradient if wanted else None for gradient, wanted in zip(gradients, ctx.mask, strict=True)
    )
    if total is not None and ctx.group_name:
        total = _sum_over_ranks(total, ctx.group_name, ctx.scattered)
    return total, grad_weight, *(None,) * 4, grad_bias, None, None


def _sum_over_ranks(gradient: Tensor, group_name: str, scattered: bool) -> Tensor:
    """Of (...) the sum; of (ranks, ...), where ``scattered``, this rank's part of it."""
    collectives = torch.ops._c10d_functional
    if scattered:
        total = collectives.reduce_scatter_tensor(gradient, "sum", gradient.shape[0], group_name)
        return collectives.wait_tensor(total)[0]
    return collectives.wait_tensor(collectives.all_reduce(gradient, "sum", group_name))


def _shard_alone(ctx: Any, grad: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::linear_cross_entropy_shard has no derivative: the gradient flows through the input and the weight of "
        "linear_cross_entropy_shard_join. Call it on detached tensors, or use "
        "xent_ops.distributed.vocab_parallel_linear_cross_entropy"
    )


def _second_backward(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "the linear cross entropy of DTensors, or of a head split over ranks, has no second derivative (it would need "
        "further collectives in backward): for one call xent_ops.linear_cross_entropy on plain tensors (full_tensor())"
    )


operator(
    "linear_cross_entropy_shard",
    check=check_shard,
    outputs=_stats,
    reference=_shard,
    composed=True,
)
autograd("linear_cross_entropy_shard", _shard_alone, save_nothing)

operator(
    "linear_cross_entropy_shard_join",
    check=_check_join,
    outputs=_joined,
    reference=_join,
    composed=True,
)
autograd("linear_cross_entropy_shard_join", _backward, _save)

operator(
    "linear_cross_entropy_shard_backward",
    check=_check_backward,
    outputs=_gradient_shapes,
    reference=_gradients,
    composed=True,
)
autograd("linear_cross_entropy_shard_backward", _second_backward, save_nothing)
