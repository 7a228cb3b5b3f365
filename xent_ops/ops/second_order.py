"""Derivatives of the backward operators, by autograd through their plain-torch references."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..kernels.options import as_record
from .contract import Call
from .dtensors import is_dtensor
from .formulas import autograd, needs_grad, save_nothing


def save_all(ctx: Any, call: Call, output: Any) -> None:
    """For a backward operator: its second derivatives need all of its arguments."""
    values = call._asdict()
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    ctx.save_for_backward(*tensors.values())
    ctx.set_materialize_grads(True)
    ctx.names, ctx.options = tuple(tensors), {name: value for name, value in values.items() if name not in tensors}


def differentiate_call(
    function: Callable[..., Any], ctx: Any, grad: Any, without: Collection[str] = ()
) -> dict[str, Tensor | None]:
    """``differentiate`` for a reference, with the arguments that ``save_all`` kept, by name."""
    names, options = ctx.names, as_record({name: value for name, value in ctx.options.items() if name not in without})

    def by_name(*tensors: Tensor) -> Any:
        return function(**dict(zip(names, tensors, strict=True)), **options)

    needs = [needs_grad(ctx, name) for name in names]
    return dict(zip(names, differentiate(by_name, ctx.saved_tensors, needs, grad), strict=True))


def without_derivative(name: str, instead: str) -> None:
    """Give an operator a formula that raises. ``instead``: why there is no derivative, and what to call."""

    def refuse(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(f"xent::{name} has no derivative{instead}")

    autograd(name, refuse, save_nothing)


def no_second_derivative() -> NoReturn:
    """For all losses without one: several of them share an operator, which does not know which was called."""
    # The lse depends on the logits of all ranks, so this rank's part of a second derivative would be silently wrong.
    raise RuntimeError(
        "this loss has no second derivative. For one class a row and plain tensors of all classes (full_tensor()), "
        "xent_ops.cross_entropy, token_loss, token_log_probs and linear_token_log_probs have one. Else write the loss "
        "in plain torch, of the log_softmax of the logits; of a distillation, of both models' logits"
    )


def refuse_second_derivatives(ctx: Any, *grads: Tensor) -> dict[str, None]:
    if any(ctx.needs_input_grad):
        no_second_derivative()
    return {}


def differentiate(
    function: Callable[..., Any],
    arguments: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    grad: Any,
) -> tuple[Tensor | None, ...]:
    """The vector-Jacobian product of ``function`` for the arguments that need it, None for the others.

    ``grad`` is one upstream gradient, or a tuple if the function returns several tensors.

    It uses torch.func.vjp, not torch.autograd.grad. So it also works inside functorch transforms, and the result can be
    differentiated again.
    """
    if is_dtensor(*arguments):
        no_second_derivative()
    indices = [i for i, needed in enumerate(needs_grad) if needed]

    def with_tensors(*tensors: Tensor) -> Tensor:
        full = list(arguments)
        for i, tensor in zip(indices, tensors, strict=True):
            full[i] = tensor
        return function(*full)

    pullback = torch.func.vjp(with_tensors, *(arguments[i] for i in indices))[1]
    grads: list[Tensor | None] = [None] * len(arguments)
    for i, value in zip(indices, pullback(grad), strict=True):
        grads[i] = value
    return tuple(grads)
