"""Decomposes our operators to core aten for compilers that lack them: ``ExportedProgram.run_decompositions``, ONNX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .head import cross_entropy, divergences, exported, ids, shard, top_k
from .kernels import reference_top_k
from .ops.library import OPERATORS, Operator

# They replace kernels that write to memory or read values. The other operators have a reference in plain torch.
_LOOPS: tuple[Callable[..., Any], ...] = (
    cross_entropy.linear_cross_entropy_forward,
    cross_entropy.linear_cross_entropy_backward,
    cross_entropy.linear_cross_entropy_with_grad,
    divergences.linear_divergences_forward,
    divergences.linear_divergences_backward,
    divergences.linear_divergences_with_grad,
    top_k.linear_top_k,
    shard.linear_cross_entropy_shard,
)
_FORMS: dict[str, Callable[..., Any]] = {
    **{loop.__name__: functools.partial(loop, backend=exported.EXPORTED) for loop in _LOOPS},
    "token_logits": functools.partial(ids.token_logits, writer=exported.Functional()),
    "top_k": functools.partial(reference_top_k.top_k, largest=reference_top_k.topk),
    "token_logits_backward": functools.partial(ids.token_logits_backward, writer=exported.Functional()),
    "linear_scale_grad": exported.linear_scale_grad,
    "linear_logits": exported.linear_logits,
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Core aten for every operator of xent_ops, together with torch's own table. For compilers that know only aten.

    Returns:
        A new table for ``ExportedProgram.run_decompositions``: ``torch.export.default_decompositions()`` and ours. The
        resulting program has core aten only, which ``torch.onnx.export`` and other backends accept.

    The formulas are those of the plain-torch kernels, in float32 (float64 for float64). A target out of range gives
    NaN, as on a GPU. In a linear loss a known number of rows is split into chunks as in the operator. A dynamic number
    of rows is a single chunk with all logits. Rows that ``skip_ignored`` would leave out are computed.

    A training step of ``make_fx`` becomes core aten too, except operators that write to an argument. These come from
    ``inplace_backward=True``, ``linear_token_loss`` and heads split over ranks. torch.export keeps them unchanged. In
    other programs their entries raise NotImplementedError.

    Examples:
        >>> model = xent_ops.LinearCrossEntropyLoss(16, 100).requires_grad_(False)
        >>> program = torch.export.export(model, (torch.randn(8, 16), torch.arange(8)))
        >>> program = program.run_decompositions(xent_ops.decompositions())
    """
    table = torch.export.default_decompositions()
    for operator in OPERATORS.values():
        table[operator.overload] = _refused(operator) if operator.overwrites else _decomposition(operator)
    return table


def _decomposition(operator: Operator) -> Callable[..., Any]:
    function = _FORMS.get(operator.name, operator.reference)

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **operator.keywords(kwargs))

    return decomposition


def _refused(operator: Operator) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"xent::{operator.name} writes to {operator.overwrites}, which core aten cannot: export a loss without its "
            "training step, under torch.no_grad() or of parameters that require no grad"
        )

    return refuse
