"""Several classes a row, ``ids`` (..., K): x of each, of a head: one product forward, three backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...head import ids as of_ids
from ...kernels.options import DEFAULTS, Chunking, Options
from .. import checks as row_checks
from ..library import Outputs, autograd, needs_grad, operator
from ..token_logits import (
    check_ids,
    check_places,
    check_upstream,
    check_values,
    outputs_of,
    refuse_derivatives,
    refuse_products,
    save_for_nothing,
)
from . import checks
from .operators import gradients_of, sums_of

_ops = torch.ops.xent


def _check(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None = None,
    with_entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    accumulate_dtype: torch.dtype | None = None,
    **chunking: Any,
) -> None:
    how = Chunking(**chunking)
    checks.head(input, linear_weight, linear_bias, accumulate_dtype, how)
    refuse_products(how.products)
    check_ids(ids, "input", input.shape[:-1], input, linear_weight.t(), options)


def _check_backward(
    grad_ids: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    at_ids: Tensor,
    lse: Tensor,
    linear_bias: Tensor | None = None,
    entropy: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    **options: Any,
) -> None:
    _check(input, linear_weight, ids, linear_bias, **options)
    checks.gradient_mask(output_mask)
    check_upstream(ids, input, "input", at_ids, grad_ids, grad_lse, grad_entropy, lse, entropy)


def _statistics(
    input: Tensor, linear_weight: Tensor, ids: Tensor, *rest: Any, options: Options = DEFAULTS, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    check_values(ids, linear_weight.shape[0], options)
    return of_ids.statistics(input, linear_weight, ids, *rest, options=options, **how)


def _outputs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None = None,
    with_entropy: bool = False,
) -> Outputs:
    return outputs_of(input, ids, with_entropy)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    input, linear_weight, ids, linear_bias, with_entropy = inputs
    at_ids, lse, entropy = output
    ctx.set_materialize_grads(False)
    if not with_entropy:
        ctx.mark_non_differentiable(entropy)
    ctx.save_for_backward(input, linear_weight, ids, at_ids, lse, linear_bias, entropy if with_entropy else None)
    ctx.options = keyword_only_inputs


def _backward(
    ctx: Any, grad_ids: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_ids is None and grad_lse is None and grad_entropy is None:
        return (None,) * 5
    input, linear_weight, ids, at_ids, lse, linear_bias, entropy = ctx.saved_tensors
    if grad_ids is None:
        grad_ids = lse.new_zeros(ids.shape)
    mask = [needs_grad(ctx, position) for position in (0, 1, 3)]
    rest = (at_ids, lse, linear_bias, None if grad_entropy is None else entropy, mask)
    made = _ops.linear_token_logits_backward(
        grad_ids, grad_lse, grad_entropy, input, linear_weight, ids, *rest, **ctx.options
    )
    of_input, of_weight, of_bias = (grad if wanted else None for grad, wanted in zip(made, mask, strict=True))
    return of_input, of_weight, None, of_bias, None


def _gradients(*args: Any) -> Outputs:
    return gradients_of(args[3], args[4], args[10] if len(args) > 10 else (True, True, True))


operator("linear_token_logits", check=_check, outputs=_outputs, reference=_statistics, composed=True)
autograd("linear_token_logits", _backward, _save)

operator(
    "linear_token_logits_backward",
    check=_check_backward,
    outputs=_gradients,
    reference=of_ids.gradients,
    composed=True,
)
autograd("linear_token_logits_backward", refuse_derivatives, save_for_nothing)


def _check_with_grad(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    grad_log_probs: Tensor,
    grad_lse_square: Tensor | None = None,
    linear_bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    _check(input, linear_weight, ids, linear_bias, accumulate_dtype=accumulate_dtype, **options)
    checks.gradient_mask(output_mask)
    check_places(ids, grad_log_probs=grad_log_probs)
    row_checks.rows_of(input, "input", grad_lse_square=grad_lse_square)


def _with_grad(
    input: Tensor, linear_weight: Tensor, ids: Tensor, *rest: Any, options: Options = DEFAULTS, **how: Any
) -> tuple[Tensor, ...]:
    check_values(ids, linear_weight.shape[0], options)
    return of_ids.with_grad(input, linear_weight, ids, *rest, options=options, **how)


def _with_grad_outputs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    grad_log_probs: Tensor,
    grad_lse_square: Tensor | None = None,
    linear_bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
) -> Outputs:
    return *outputs_of(input, ids, False)[:2], *sums_of(input, linear_weight, output_mask, accumulate_dtype)


operator(
    "linear_token_logits_with_grad",
    check=_check_with_grad,
    outputs=_with_grad_outputs,
    reference=_with_grad,
    composed=True,
)
autograd("linear_token_logits_with_grad", refuse_derivatives, save_for_nothing)
