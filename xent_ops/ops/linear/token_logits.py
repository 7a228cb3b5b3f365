"""Several classes per row, ``ids`` (..., K): x of each, from a head. One product forward, three backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...head import ids as head_ids
from ..formulas import Gradients, autograd, run_backward, save_nothing
from ..library import operator
from ..rules import check_targets
from ..second_order import refuse_second_derivatives
from ..token_logits import save
from .operators import by_name, mask_of


def _backward(ctx: Any, grad_ids: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None) -> Gradients:
    mask = mask_of(ctx)
    grads: dict[str, Any] = {"grad_ids": grad_ids, "grad_lse": grad_lse, "grad_entropy": grad_entropy}
    return by_name(mask, run_backward(ctx, None, **grads, output_mask=mask))


operator("linear_token_logits", reference=head_ids.statistics, check_values=check_targets, calls_operators=True)
autograd("linear_token_logits", _backward, save("linear_token_logits_backward"))

operator("linear_token_logits_backward", reference=head_ids.gradients, calls_operators=True)
autograd("linear_token_logits_backward", refuse_second_derivatives, save_nothing)
