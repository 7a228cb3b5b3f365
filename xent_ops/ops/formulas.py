"""Formulas of operators' derivatives: what a call saves, and the operator that its backward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, transforms
from .contract import Call
from .dtensors import locals_of
from .library import LIBRARY, OPERATORS, below_autograd

GradientsByName = Mapping[str, "Tensor | None"]  # by argument name


def autograd(
    name: str,
    backward: Callable[..., GradientsByName],
    save: Callable[[Any, Call, Any], None],
    constants: Sequence[str] = (),
) -> None:
    """Add a formula: ``save(ctx, call, output)``, and ``backward(ctx, *grads)``, which returns gradients by name.

    ``constants``: arguments without a derivative. If one of them requires grad, the call raises.
    """
    contract = OPERATORS[name].contract
    positional = contract.arguments[: len(contract.arguments) - len(contract.keyword_only)]
    refused = [(contract.positions[argument], argument) for argument in constants]

    # torch passes keyword_only_inputs if the operator has any, and inserts the defaults.
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None) -> None:
        ctx.positions = contract.positions
        ctx.set_materialize_grads(False)
        for position, argument in refused:
            if any(ctx.needs_input_grad[position : position + 1]):  # as needs_grad, without a call
                checks.constant_needs_grad(argument)
        save(ctx, contract.bind(inputs, keyword_only_inputs or {}), output)

    def formula(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        gradients = {} if all(grad is None for grad in grads) else backward(ctx, *grads)
        return tuple([gradients.get(argument) for argument in positional])

    torch.library.register_autograd(f"xent::{name}", formula, setup_context=setup_context, lib=LIBRARY)
    overload = OPERATORS[name].overload

    def forward(ctx: Any, *inputs: Any) -> Any:
        *args, keywords = inputs
        output = below_autograd(overload, *args, **keywords)
        setup_context(ctx, tuple(args), output, keywords)
        return output

    def backward_of_node(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return *formula(ctx, *grads)[: len(ctx.needs_input_grad) - 1], None

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_node)}
    node = type(f"xent_{name}", (torch.autograd.Function,), functions)
    # Function.apply would bind forward's signature at every call, for 20 us of host time.
    OPERATORS[name].node = super(torch.autograd.Function, node).apply  # type: ignore[misc]


def differentiable(name: str, *args: Any, **keywords: Any) -> Any:
    """Call an operator that has a formula, in eager as one node of ours.

    The wrapper of torch.library reads the schema's list once for each argument: 250 us of the host for an operator with
    25 arguments (torch 2.11, the host of an H100, 2026-11).
    """
    operator = OPERATORS[name]
    if not torch.is_grad_enabled() or transforms.any_tracer() or transforms.functorch_is_active():
        return operator.overload(*args, **keywords)
    return operator.node(*args, keywords)


def needs_grad(ctx: Any, name: str) -> bool:
    """Does this argument need a gradient? The dispatcher omits defaults at the end."""
    position = ctx.positions[name]
    return any(ctx.needs_input_grad[position : position + 1])


def save_nothing(ctx: Any, call: Call, output: Any) -> None:
    """For a formula that only raises."""


def save_for(ctx: Any, name: str, call: Call, *also: str, **results: Any) -> None:
    """Keep the arguments of the backward operator ``name`` that the call or results have, and the names in ``also``."""
    names, tensors, options = _kept(name, call.__class__, also, tuple(results))
    kept = [call[index] for index in tensors]
    ctx.save_for_backward(*kept, *results.values(), *locals_of(call.primary, *kept))
    ctx.kept = name, names, [call[index] for index in options]


@functools.cache
def _kept(
    name: str, call: Any, also: tuple[str, ...], results: tuple[str, ...]
) -> tuple[tuple[str, ...], list[int], list[int]]:
    """(names of the tensors, the results and the options to keep; positions of the tensors, and of the options)."""
    fields = call._fields
    kept = [field for field in (*OPERATORS[name].arguments, *also) if field in fields and field not in results]
    tensors, options = ([field for field in kept if (field in call.tensors) == wanted] for wanted in (True, False))
    return (*tensors, *results, *options), [*map(fields.index, tensors)], [*map(fields.index, options)]


def saved(ctx: Any) -> dict[str, Any]:
    _name, names, options = ctx.kept
    return dict(zip(names, (*ctx.saved_tensors[: len(names) - len(options)], *options), strict=True))


def call_of(name: str, values: Mapping[str, Any]) -> Call:
    """A call of an operator with those of these values that it takes."""
    contract = OPERATORS[name].contract
    return contract.blank(**{argument: values[argument] for argument in contract.arguments if argument in values})


def run(name: str, values: Mapping[str, Any]) -> Any:
    """Call an operator with the values of its arguments. Other values are ignored."""
    operator, call = OPERATORS[name].overload, call_of(name, values)
    keywords = {argument: getattr(call, argument) for argument in OPERATORS[name].contract.keyword_only}
    return operator(*call[: len(call) - len(keywords)], **keywords)


def run_backward(ctx: Any, grad_loss: Tensor | None, kept: dict[str, Any] | None = None, **updates: Any) -> Any:
    """Run the operator that ``save_for`` named, with the values that it kept and with these updates.

    An entropy without a gradient is left out. Beside an lse, a loss without a gradient gets a gradient of 0, and so do
    classes named by ids. ``kept``: what ``saved`` returned. A checkpoint lets a backward unpack its tensors once.
    """
    values = (saved(ctx) if kept is None else kept) | updates
    if updates.get("grad_entropy") is None:
        values.pop("entropy", None)
    lse = values.get("lse")
    values["grad_loss"] = lse.new_zeros(()) if grad_loss is None and lse is not None else grad_loss
    if lse is not None and values.get("ids") is not None and updates.get("grad_ids") is None:
        values["grad_ids"] = lse.new_zeros(values["ids"].shape)
    return run(ctx.kept[0], values)
