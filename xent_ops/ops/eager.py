"""Eager training: the whole loss of class indices as one autograd.Function around the same operators.

The composite operator gives autograd a node for each torch call of a reduction, and each operator with a formula a
second dispatch: measured with empty kernels, more than half of the wall time of a small loss (docs/design.md). Here is
one node, and the operators are called below autograd. In-place gradients have their Functions here as well: autograd's
version counter protects them, so that a producer that saved its output, a second backward and retain_graph all find
a tensor that was modified in place, and raise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import reference
from .composite import Counts, count_rows, reduce_rows

_PLAIN = (Tensor, torch.nn.Parameter)


class Settings(NamedTuple):
    """Arguments of the loss that are no tensors; ``options`` are those of the row operators."""

    reduction: str
    lse_square_scale: float
    options: dict[str, Any]


def undisturbed(*tensors: Tensor | None) -> bool:
    """May the loss be one node of autograd? Not where somebody watches the torch calls that it is made of.

    Those are modes (tracers among them), subclasses of Tensor, torch.jit.trace. Functorch and Dynamo come first.
    """
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._get_tracing_state() is None
        and all(tensor is None or type(tensor) in _PLAIN for tensor in tensors)
    )


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    settings: Settings,
    *,
    inplace_backward: bool = False,
    grad_in_forward: bool = False,
) -> Tensor:
    """The reduced loss of logits (..., V) that require grad; what the operators do not check, the caller has."""
    if inplace_backward:
        if logits.is_leaf:
            raise RuntimeError(
                "inplace_backward=True would overwrite a leaf tensor that requires grad with its own gradient: "
                "pass the output of a layer, or leave inplace_backward off"
            )
        if any(stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True) if size > 1):
            raise RuntimeError("inplace_backward=True cannot write into expanded logits, whose rows share memory")
    if grad_in_forward:
        return _OnePass.apply(logits, target, weight, settings, inplace_backward)
    return (_InPlace if inplace_backward else _TwoPass).apply(logits, target, weight, settings)


def below(operator: Any, *args: Any, **options: Any) -> Any:
    """An operator below autograd, which records nothing in here: that spares the dispatch to a formula."""
    if torch.compiler.is_compiling():  # compiled autograd traces the backward
        return operator(*args, **options)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args, **options)


def _count(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> Counts:
    return count_rows(
        target,
        weight,
        ignore_index=settings.options["ignore_index"],
        lse_square_scale=settings.lse_square_scale,
        reduction=settings.reduction,
        classes=logits.shape[-1],
        dtype=reference.accumulator(logits),
    )


def _reduce(loss: Tensor, lse: Tensor, counts: Counts, settings: Settings) -> Tensor:
    return reduce_rows(loss, lse, counts, lse_square_scale=settings.lse_square_scale, reduction=settings.reduction).loss


def _refuse_second_derivative(option: str) -> None:
    """Not ``once_differentiable``: that is silent where the upstream gradient itself needs no gradient."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{option}=True leaves nothing to differentiate a second time, which create_graph=True asks for"
        )


def _upstream(grad: Tensor, lse: Tensor, counts: Counts, settings: Settings) -> tuple[Tensor, Tensor | None]:
    """grad_loss and grad_lse of the rows, from the gradient of the reduced loss."""
    grad_loss = grad if counts.weights is None else grad / counts.weights
    grad_lse = None
    if settings.lse_square_scale != 0.0:
        assert counts.counted is not None
        per_row = grad if counts.number is None else grad / counts.number
        grad_lse = torch.where(counts.counted, lse, 0.0) * (2 * settings.lse_square_scale * per_row)
    return grad_loss.expand(lse.shape), grad_lse


class _TwoPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> Tensor:
        loss, lse = below(torch.ops.xent.cross_entropy_forward.default, logits, target, weight, **settings.options)
        counts = _count(logits, target, weight, settings)
        ctx.save_for_backward(logits, target, weight, lse, *counts)
        ctx.settings = settings
        return _reduce(loss, lse, counts, settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, weight, lse, *counts = ctx.saved_tensors
        settings = ctx.settings
        if torch.is_grad_enabled():  # create_graph: the gradient has to be differentiable itself
            again = torch.ops.xent.cross_entropy(
                logits,
                target,
                weight,
                lse_square_scale=settings.lse_square_scale,
                reduction=settings.reduction,
                **settings.options,
            )
            return *torch.autograd.grad(again, logits, grad, create_graph=True), None, None, None
        grads = _upstream(grad, lse, Counts(*counts), settings)
        operator = torch.ops.xent.cross_entropy_backward.default
        return below(operator, *grads, logits, target, lse, weight, **settings.options), None, None, None


class _InPlace(_TwoPass):
    """The backward writes the gradient over the logits."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative("inplace_backward")
        logits, target, weight, lse, *counts = ctx.saved_tensors
        grads = _upstream(grad, lse, Counts(*counts), ctx.settings)
        operator = torch.ops.xent.cross_entropy_backward_.default
        below(operator, *grads, logits, target, lse, weight, **ctx.settings.options)
        return logits.detach(), None, None, None


class _OnePass(torch.autograd.Function):
    """The forward makes the gradient too, for an upstream gradient of one; the backward multiplies it by another."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings, in_place: bool
    ) -> Tensor:
        counts = _count(logits, target, weight, settings)
        one = torch.ones((), dtype=reference.accumulator(logits), device=logits.device)
        scale = one if counts.weights is None else one / counts.weights
        square = None
        if settings.lse_square_scale != 0.0:
            square = settings.lse_square_scale * (one if counts.number is None else one / counts.number)
        args = (logits, target, scale, square, weight)
        if in_place:
            loss, lse = below(torch.ops.xent.cross_entropy_with_grad_.default, *args, **settings.options)
            ctx.save_for_backward(logits)
        else:
            loss, lse, gradient = below(torch.ops.xent.cross_entropy_with_grad.default, *args, **settings.options)
            ctx.save_for_backward(gradient)
        ctx.spent = False
        return _reduce(loss, lse, counts, settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative("grad_in_forward")
        if ctx.spent:
            raise RuntimeError(
                "a second backward through a loss with grad_in_forward=True: its gradient was made once, and the first "
                "backward has scaled it and given it away. Leave grad_in_forward off to go through the loss again"
            )
        (gradient,) = ctx.saved_tensors
        ctx.spent = True
        gradient = gradient.detach()
        below(torch.ops.xent.scale_grad_.default, gradient, grad)
        return gradient, None, None, None, None
