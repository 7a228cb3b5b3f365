"""Row operators of a vocabulary split over ranks: a shard's part, and the join of all parts.

No operator communicates. The caller's all-gather (distributed/parts.py) stands between ``cross_entropy_shard`` and the
operator that joins the parts, where every tracer and every pass that moves collectives can see it. The join, of rows
or reduced, carries the gradient: it takes the logits, whose values it does not read, and its formula is
``cross_entropy_backward`` of a slice, which needs the lse of the whole vocabulary and so no collective. The shard
itself is called on detached logits.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..kernels import reference, reference_shard
from . import checks
from .library import Outputs, autograd, needs_grad, operator, save_nothing


def _check_join(
    logits: Tensor,
    target: Tensor,
    gathered: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    **options: Any,
) -> None:
    checks.shard(logits, target, class_start, num_classes, weight, **options)
    check_gathered(gathered, logits, target, weight)


def check_gathered(gathered: Tensor, like: Tensor, target: Tensor, weight: Tensor | None) -> None:
    """The statistics of all ranks, for logits or an input that are like this tensor."""
    width = reference_shard.width(target.numel(), weight is not None)
    if type(width) is not int or gathered.dim() != 2 or gathered.shape[1] != width:
        checks.check_value(
            gathered.dim() == 2 and gathered.shape[1] == width,
            lambda: (
                f"gathered has shape {tuple(gathered.shape)}; expected (ranks, {width}), one result of "
                "cross_entropy_shard for each rank"
            ),
        )
    checks.same_device("gathered", gathered, like)
    if gathered.dtype != reference.accumulator(like):
        raise TypeError(f"gathered has dtype {gathered.dtype}; expected {reference.accumulator(like)}")


def _check_reduced(
    logits: Tensor, *args: Any, lse_square_scale: float = 0.0, reduction: str = "mean", **options: Any
) -> None:
    _check_join(logits, *args, **options)
    checks.reduced_options(logits, lse_square_scale, reduction)


def _parts(logits: Tensor, target: Tensor, class_start: int, num_classes: int, weight: Tensor | None = None) -> Outputs:
    return (((1, reference_shard.width(target.numel(), weight is not None)), reference.accumulator(logits)),)


def _joined(logits: Tensor, target: Tensor, *_: Any) -> Outputs:
    return ((target.shape, reference.accumulator(logits)),) * 4


def _reduced(logits: Tensor, target: Tensor, *_: Any) -> Outputs:
    dtype = reference.accumulator(logits)
    return ((), dtype), ((2,), dtype), (target.shape, dtype), (target.shape, dtype)


def _save(
    ctx: Any,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    lse: Tensor,
    coefficient: Tensor,
    divisor: Tensor | None = None,
) -> None:
    logits, target, _gathered, class_start, num_classes, weight = inputs
    if needs_grad(ctx, 5):
        checks.weight_needs_grad()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, lse, weight, divisor, None if weight is None else coefficient)
    ctx.shard_range, ctx.options = (class_start, num_classes), options


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 5
    if grad_loss is None and grad_lse is None:
        return None, *nothing
    logits, target, lse, weight, divisor, coefficient = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(())
    rest = (target, lse, weight, divisor, None, None, coefficient, *ctx.shard_range)
    grad = torch.ops.xent.cross_entropy_backward(grad_loss, grad_lse, logits, *rest, **ctx.options)
    return grad, *nothing


def _save_rows(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]
) -> None:
    _loss, lse, target_weight, coefficient = output
    ctx.mark_non_differentiable(target_weight, coefficient)
    _save(ctx, inputs, keyword_only_inputs, lse, coefficient)


def _save_reduced(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]
) -> None:
    _value, divisor, lse, coefficient = output
    ctx.mark_non_differentiable(divisor, coefficient)
    options = dict(keyword_only_inputs)
    mean = options.pop("reduction", "mean") == "mean"
    _save(ctx, inputs, options, lse, coefficient, divisor if mean else None)


def _reduced_backward(
    ctx: Any, grad_value: Tensor | None, _divisor: None, grad_lse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    return _backward(ctx, grad_value, grad_lse)


def _shard_alone(ctx: Any, grad: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::cross_entropy_shard has no derivative: the gradient flows through the logits of "
        "cross_entropy_shard_join. Call it on detached logits, or use xent_ops.distributed.vocab_parallel_cross_entropy"
    )


operator(
    "cross_entropy_shard",
    check=checks.shard,
    outputs=_parts,
    reference=reference_shard.cross_entropy_shard,
    check_values=checks.shard_values,
    ascend=True,
)
autograd("cross_entropy_shard", _shard_alone, save_nothing)

operator(
    "cross_entropy_shard_join",
    check=_check_join,
    outputs=_joined,
    reference=reference_shard.cross_entropy_shard_join,
    ascend=True,
)
autograd("cross_entropy_shard_join", _backward, _save_rows)

operator(
    "cross_entropy_shard_reduced",
    check=_check_reduced,
    outputs=_reduced,
    reference=reference_shard.cross_entropy_shard_reduced,
    ascend=True,
)
autograd("cross_entropy_shard_reduced", _reduced_backward, _save_reduced)
