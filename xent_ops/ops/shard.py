"""Row operators of a vocabulary split over ranks: a shard's part, the join of all parts, the shard's gradient.

No operator communicates. Between ``cross_entropy_shard`` and ``cross_entropy_shard_join`` stands the caller's
all-gather (distributed/parts.py), which every tracer and every pass that moves collectives can see. The join
carries the gradient: it takes the logits, whose values it does not read, and its formula is
``cross_entropy_shard_backward``, which needs the lse of the whole vocabulary and so no collective. The shard itself
is called on detached logits.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..kernels import reference, reference_shard
from . import checks
from .library import LOWERINGS, autograd, define, fake, kernels, save_nothing


def _check_values(
    logits: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    **options: Any,
) -> None:
    checks.check_targets(target, num_classes, ignore_index)


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
    width = reference_shard.width(target.numel(), weight is not None)
    if type(width) is not int or gathered.dim() != 2 or gathered.shape[1] != width:
        torch._check_value(
            gathered.dim() == 2 and gathered.shape[1] == width,
            lambda: (
                f"gathered has shape {tuple(gathered.shape)}; expected (ranks, {width}), one result of "
                "cross_entropy_shard for each rank"
            ),
        )
    checks.same_device("gathered", gathered, logits)
    if gathered.dtype != reference.accumulator(logits):
        raise TypeError(f"gathered has dtype {gathered.dtype}; expected {reference.accumulator(logits)}")


def _check_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    coefficient: Tensor | None = None,
    **options: Any,
) -> None:
    checks.shard(logits, target, class_start, num_classes, weight, **options)
    if weight is not None and coefficient is None:
        raise ValueError("a class weight needs the coefficient that cross_entropy_shard_join returned")
    checks.rows_of(logits, grad_loss=grad_loss, grad_lse=grad_lse, lse=lse, coefficient=coefficient)


def _fake_shard(logits: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    checks.shard(logits, target, *args, **options)
    weighted = len(args) > 2 and args[2] is not None
    return logits.new_empty((1, reference_shard.width(target.numel(), weighted)), dtype=reference.accumulator(logits))


def _fake_join(logits: Tensor, target: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    _check_join(logits, target, *args, **options)
    return tuple(logits.new_empty(target.shape, dtype=reference.accumulator(logits)) for _ in range(4))


def _fake_backward(grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *args: Any, **options: Any) -> Tensor:
    _check_backward(grad_loss, grad_lse, logits, *args, **options)
    return logits.new_empty(logits.shape)


def _check_backward_(grad_loss: Tensor, grad_lse: Tensor | None, logits: Tensor, *args: Any, **options: Any) -> None:
    checks.without_grad("logits", logits)
    _check_backward(grad_loss, grad_lse, logits, *args, **options)
    checks.writable("logits", logits)


def _fake_backward_(*args: Any, **options: Any) -> None:
    _check_backward(*args, **options)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    logits, target, _gathered, class_start, num_classes, weight = inputs
    if ctx.needs_input_grad[5]:
        checks.weight_needs_grad()
    _loss, lse, target_weight, coefficient = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(target_weight, coefficient)
    ctx.save_for_backward(logits, target, lse, weight, None if weight is None else coefficient)
    ctx.place = class_start, num_classes
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 5
    if grad_loss is None and grad_lse is None:
        return None, *nothing
    logits, target, lse, weight, coefficient = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = lse.new_zeros(()).expand(lse.shape)
    grad = torch.ops.xent.cross_entropy_shard_backward(
        grad_loss, grad_lse, logits, target, lse, *ctx.place, weight, coefficient, **ctx.options
    )
    return grad, *nothing


def _shard_alone(ctx: Any, grad: Tensor) -> NoReturn:
    raise RuntimeError(
        "xent::cross_entropy_shard has no derivative: the gradient flows through the logits of "
        "cross_entropy_shard_join. Call it on detached logits, or use xent_ops.distributed.vocab_parallel_cross_entropy"
    )


def _second_backward(ctx: Any, grad: Tensor) -> NoReturn:
    # The lse depends on the logits of all ranks: this rank's part of a second derivative would be wrong without a word.
    raise RuntimeError(
        "the vocabulary-parallel cross entropy has no second derivative (it would need a collective in backward); "
        "gather the logits and call xent_ops.cross_entropy for one"
    )


define("cross_entropy_shard")
fake("cross_entropy_shard", _fake_shard)
kernels("cross_entropy_shard", checks.shard, reference_shard.cross_entropy_shard, _check_values, module="launch_shard")
autograd("cross_entropy_shard", _shard_alone, save_nothing)

JOIN = define("cross_entropy_shard_join")
fake("cross_entropy_shard_join", _fake_join)
kernels("cross_entropy_shard_join", _check_join, reference_shard.cross_entropy_shard_join, module="launch_shard")
autograd("cross_entropy_shard_join", _backward, _save)
LOWERINGS[JOIN] = reference_shard.cross_entropy_shard_join

BACKWARD = define("cross_entropy_shard_backward")
fake("cross_entropy_shard_backward", _fake_backward)
kernels(
    "cross_entropy_shard_backward", _check_backward, reference_shard.cross_entropy_shard_backward, module="launch_shard"
)
autograd("cross_entropy_shard_backward", _second_backward, save_nothing)
LOWERINGS[BACKWARD] = reference_shard.cross_entropy_shard_backward

define("cross_entropy_shard_backward_")
fake("cross_entropy_shard_backward_", _fake_backward_)
kernels(
    "cross_entropy_shard_backward_",
    _check_backward_,
    reference_shard.cross_entropy_shard_backward_,
    module="launch_shard",
)
