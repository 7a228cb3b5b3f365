"""A loss of class indices as one node of autograd, for eager training.

Compiled, exported and traced calls, and calls without gradients, use the composite operator instead. The transforms
of torch.func, forward-mode AD and batches of upstream gradients (is_grads_batched) use plain torch. The node calls
registered operators below autograd: modes, profilers, subclasses of Tensor and kernels of users see these calls.

In-place gradients rely on autograd's version counter: a producer that saved its output, a second backward and
retain_graph all find a modified tensor and raise. Inside saved-tensor hooks (a non-reentrant checkpoint uses them)
autograd compares no versions, so there the gradient gets its own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reductions, reference, reference_with_grad
from ..kernels.options import LossOptions, as_record
from . import checks, overwriting, transforms
from .dtensors import locals_of
from .formulas import differentiable
from .library import below_autograd, check_call_of
from .second_order import differentiate

_ops = torch.ops.xent


def cross_entropy(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (...), class indices
    weight: Tensor | None,
    loss: LossOptions,
    token_weight: Tensor | None = None,
    *,
    inplace_backward: bool = False,
    grad_in_forward: bool = False,
) -> Tensor:
    """The loss, by the implementation that fits the call: see the module."""
    if grad_in_forward and wants_gradient(logits):
        return logits_with_grad(logits, target, weight, loss, token_weight, inplace_backward)[0]
    if token_weight is not None and loss.reduction != "none" and not _in_plain_torch():
        return summarised(logits, target, weight, loss, token_weight)[0]
    if token_weight is not None or transforms.functorch_is_active() or transforms.forward_mode():
        return by_rows(logits, target, weight, loss, token_weight)
    if transforms.is_traced() or not (logits.requires_grad and torch.is_grad_enabled()):
        return _ops.cross_entropy(logits, target, weight, **loss.keywords())
    checks.constant("weight", weight)
    return _apply(logits, target, weight, loss, inplace_backward and _may_overwrite(logits))


def _in_plain_torch() -> bool:
    """Is this call traced, or inside a transform?"""
    return transforms.functorch_is_active() or transforms.forward_mode() or transforms.is_traced()


def wants_gradient(logits: Tensor) -> bool:
    """Is this an eager call that autograd records?"""
    return logits.requires_grad and torch.is_grad_enabled() and not _in_plain_torch()


def summarised(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    loss: LossOptions,
    token_weight: Tensor | None,
    with_statistics: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, ...]:
    """(value, z-loss, accuracy, loss, lse, argmax, entropy) of a mean or a sum, in eager."""
    checks.constant("weight", weight)
    return _apply_summary(logits, target, weight, token_weight, loss, with_statistics, batch_invariant)


def logits_with_grad(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    loss: LossOptions,
    token_weight: Tensor | None,
    in_place: bool = False,
    with_statistics: bool = False,
) -> tuple[Tensor, ...]:
    """The same of any reduction, constants but for the value, whose gradient the forward computes.

    For "none", z-loss and accuracy are None.
    """
    checks.constant("weight", weight)
    in_place = in_place and _may_overwrite(logits)
    return _apply_grad_in_forward(logits, target, weight, token_weight, loss, in_place, with_statistics)


def by_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, loss: LossOptions, token_weight: Tensor | None = None
) -> Tensor:
    """The loss from its rows. For transforms and forward-mode AD it is plain torch."""
    checks.constant("weight", weight)
    if transforms.functorch_is_active() or transforms.forward_mode():
        check_call_of("cross_entropy_forward", logits, target, weight, **loss.row_options._asdict())
        # The gradient of an ignored row is zero even if its logits are NaN.
        logits = torch.where(reference.is_counted(target, loss.row_options.ignore_index).unsqueeze(-1), logits, 0.0)
        row_loss, lse, _ = reference.cross_entropy_forward(logits, target, weight, options=loss.row_options)
    else:
        keywords = loss.row_options.keywords()
        row_loss, lse, *_ = differentiable("cross_entropy_forward", logits, target, weight, **keywords)
    divisors = None
    if loss.reduction != "none":
        divisors = reductions.divisors_of(target, weight, token_weight, None, loss, lse.dtype)
    return reductions.reduce_rows(row_loss, lse, target, divisors, loss, token_weight).value


def _may_overwrite(logits: Tensor) -> bool:
    """May the gradient overwrite the logits? Raises if the caller must not ask for it.

    A leaf, or a view of one, is refused, as torch's own in-place operators do.
    """
    if any(x is not None and x.is_leaf and x.requires_grad for x in (logits, logits._base)):
        raise RuntimeError(
            "inplace_backward=True would overwrite a leaf tensor that requires grad, or a view of it, with its own "
            "gradient: pass the output of a layer, or leave inplace_backward off"
        )
    overwriting.writable("logits", logits)
    return not transforms.in_saved_tensors_hooks() and not logits.is_neg()


def _refuse_derivatives(option: str, grad: Tensor) -> None:
    """Not ``once_differentiable``: it raises nothing if the upstream gradient itself needs no gradient."""
    if transforms.is_batch(grad) or transforms.active():
        raise NotImplementedError(
            f"{option}=True has one gradient to give: its backward under vmap (is_grads_batched=True), another "
            "functorch transform or forward-mode AD is not supported"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{option}=True leaves nothing to differentiate a second time, which create_graph=True asks for"
        )


def _forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, loss: LossOptions, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(value, divisors of a mean, lse, lse_low). ``options``: keywords for the backward."""
    reduced = _ops.cross_entropy_reduced.default
    if loss.reduction == "mean":
        return below_autograd(reduced, logits, target, weight, **options)
    if loss.reduction == "sum":
        value, _, *lses = below_autograd(reduced, logits, target, weight, reduction="sum", **options)
        return value, None, *lses
    rows = loss.row_options.keywords()
    row_loss, lse, _, _, lse_low = below_autograd(_ops.cross_entropy_forward.default, logits, target, weight, **rows)
    return reductions.reduce_rows(row_loss, lse, target, None, loss).value, None, lse, lse_low


class CrossEntropyFunction(torch.autograd.Function):
    """For eager mode. It returns only the loss: returning the saved tensors too would cost the host 2 us."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, loss: LossOptions, in_place: bool
    ) -> Tensor:
        options = loss.backward_keywords()
        value, divisors, lse, lse_low = _forward(logits, target, weight, loss, options)
        ctx.save_for_backward(logits, target, lse, weight, divisors, lse_low, *locals_of(logits, target, weight))
        ctx.options, ctx.in_place = options, in_place
        ctx.set_materialize_grads(False)  # of a DTensor the zeros would be a plain tensor
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        if ctx.in_place:
            _refuse_derivatives("inplace_backward", grad)
        return _gradient_of_logits(grad, None, ctx.saved_tensors[:6], ctx.options, ctx.in_place), None, None, None, None


class SummaryFunction(torch.autograd.Function):
    """A mean or a sum, with what can be known of its rows. The value and the lse are differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        token_weight: Tensor | None,
        loss: LossOptions,
        with_statistics: bool,
        batch_invariant: bool,
    ) -> tuple[Tensor, ...]:
        flags = (with_statistics, with_statistics, batch_invariant, True)
        options = loss.row_options.keywords()
        rows = below_autograd(_ops.cross_entropy_forward.default, logits, target, weight, *flags, **options)
        row_loss, lse, argmax, entropy, lse_low = rows
        row_args = (row_loss, lse, target, weight, token_weight, None, argmax if with_statistics else None)
        keywords = loss.reduction_keywords()
        value, divisors, *summary = below_autograd(_ops.row_summary.default, *row_args, **keywords)
        divided = divisors if loss.reduction == "mean" else None
        local = locals_of(logits, target, weight, token_weight)
        ctx.save_for_backward(logits, target, lse, weight, divided, lse_low, token_weight, *local)
        ctx.options = loss.backward_keywords()
        ctx.mark_non_differentiable(*summary, row_loss, argmax, entropy)
        ctx.set_materialize_grads(False)
        return value, *summary, *rows[:4]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Any) -> tuple[Tensor | None, ...]:
        *saved, token_weight = ctx.saved_tensors[:7]
        (_, target, lse, *_), (_z_loss, _accuracy, _loss, grad_lse, *_) = saved, grads
        if grad is None:
            if grad_lse is None:
                return (None,) * 7
            grad = lse.new_zeros(())
        ignore_index = as_record(ctx.options)["options"].ignore_index
        if token_weight is not None:
            if torch.is_grad_enabled():  # else the kernel masks the weights of ignored rows, which may be NaN
                token_weight = reductions.counted_weights(token_weight, target, ignore_index, grad.dtype)
            grad = grad * token_weight.to(grad.dtype)
        if grad_lse is not None:  # that of an ignored row may be NaN, since its lse is infinite
            grad_lse = torch.where(reference.is_counted(target, ignore_index), grad_lse, 0.0)
        return _gradient_of_logits(grad, grad_lse, saved, ctx.options), *(None,) * 6


def _gradient_of_logits(
    grad: Tensor, grad_lse: Tensor | None, saved: Sequence[Any], options: dict[str, Any], in_place: bool = False
) -> Tensor:
    if transforms.is_batch(grad) or transforms.forward_mode():  # operators would loop, or drop the tangent
        return _gradient_in_plain_torch(grad, grad_lse, saved, options)
    # A node of its own, which costs the host 30 us, only if its derivative is wanted.
    gradient: Any = GradientFunction.apply if torch.is_grad_enabled() else GradientFunction.forward
    return gradient(grad, grad_lse, *saved, options, in_place)


class GradientFunction(torch.autograd.Function):
    """The gradient of the logits. Its own derivative is autograd through plain torch."""

    @staticmethod
    def forward(
        grad: Tensor,
        grad_lse: Tensor | None,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        weight: Tensor | None,
        divisors: Tensor | None,
        lse_low: Tensor,
        options: dict[str, Any],
        in_place: bool,
    ) -> Tensor:
        arguments, options = (grad, grad_lse, logits, target, lse, weight, divisors), {**options, "lse_low": lse_low}
        if in_place and not torch.compiler.is_compiling():
            below_autograd(_ops.cross_entropy_backward_.default, *arguments, **options)
            return logits.detach()
        return below_autograd(_ops.cross_entropy_backward.default, *arguments, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.options, _ = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
        def gradient(grad: Tensor, grad_lse: Tensor | None, *saved: Any) -> Tensor:
            return _gradient_in_plain_torch(grad, grad_lse, saved, ctx.options)

        needs = [i < 3 and needed for i, needed in enumerate(ctx.needs_input_grad[:8])]
        return *differentiate(gradient, ctx.saved_tensors, needs, grad_grad), None, None


def _gradient_in_plain_torch(
    grad: Tensor, grad_lse: Tensor | None, saved: Sequence[Any], options: dict[str, Any]
) -> Tensor:
    """Compute the lse again, because it depends on the logits."""
    (logits, target, _, weight, divisors, _), keywords = saved, as_record(options)
    _, lse, keywords["lse_low"] = reference.cross_entropy_forward(logits, target, weight, options=keywords["options"])
    return reference.cross_entropy_backward(grad, grad_lse, logits, target, lse, weight, divisors, **keywords)


class GradInForwardFunction(torch.autograd.Function):
    """The forward computes the gradient for an upstream gradient of one. The backward multiplies it by the real one."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        token_weight: Tensor | None,
        loss: LossOptions,
        in_place: bool,
        with_statistics: bool,
    ) -> tuple[Tensor, ...]:
        options, dtype = loss.row_options.keywords(), reference.accumulator(logits)
        reduction = "mean" if loss.reduction == "mean" else "sum"
        keywords, row_args = loss._replace(reduction=reduction).reduction_keywords(), (target, weight, token_weight)
        divisors, scale, square = below_autograd(_ops.row_divisors.default, *row_args, dtype=dtype, **keywords)
        square = None if loss.lse_square_scale == 0.0 else square
        arguments = (logits, target, scale, square, weight, with_statistics, with_statistics)
        if in_place:
            rows = below_autograd(_ops.cross_entropy_with_grad_.default, *arguments, **options)
            ctx.save_for_backward(logits)
        else:
            *rows, gradient = below_autograd(_ops.cross_entropy_with_grad.default, *arguments, **options)
            ctx.save_for_backward(gradient)
        ctx.spent = False
        row_loss, lse, argmax, _ = rows
        ctx.set_materialize_grads(False)
        if loss.reduction == "none":
            ctx.mark_non_differentiable(*rows)
            value = reductions.reduce_rows(row_loss, lse, target, None, loss, token_weight).value
            return value.clone() if value is row_loss else value, None, None, *rows
        summary_args = (row_loss, lse, target, None, token_weight, divisors, argmax if with_statistics else None)
        value, _, *summary = below_autograd(_ops.row_summary.default, *summary_args, **keywords)
        ctx.mark_non_differentiable(*summary, *rows)
        return value, *summary, *rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        _refuse_derivatives("grad_in_forward", grad)
        if ctx.spent:
            raise RuntimeError(
                "a second backward through a loss with grad_in_forward=True: its gradient was made once, and the first "
                "backward has scaled it and given it away. Leave grad_in_forward off to go through the loss again"
            )
        (gradient,) = ctx.saved_tensors
        gradient = gradient.detach()
        if transforms.is_recorded():  # functionalization would hide a write from xent_ops.decompositions
            gradient = reference_with_grad.scaled_grad(gradient, grad)
        else:
            below_autograd(_ops.scale_grad_.default, gradient, grad)
        ctx.spent = True
        return gradient, *(None,) * 6


_nodes: Any = CrossEntropyFunction, SummaryFunction, GradInForwardFunction
# Function.apply would bind forward's signature at every call, for up to 20 us of host time.
_apply, _apply_summary, _apply_grad_in_forward = (super(torch.autograd.Function, node).apply for node in _nodes)
