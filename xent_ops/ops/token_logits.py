"""Several classes per row, ``ids`` (..., K): x of each in logits. The backward is one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..head import ids as head_ids
from ..kernels import reference_ids
from . import checks
from .contract import Call
from .formulas import GradientsByName, autograd, run_backward, save_for, save_nothing
from .library import operator
from .rules import check_targets
from .second_order import refuse_second_derivatives


def target_and_ids(target: Tensor, rows: int, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """(one target per row, ids). A target with one dimension more than ``rows`` has ids: several classes per row."""
    if target.dim() != rows + 1:
        return target, None
    checks.dtype("target", target, checks.INDICES)
    at_least_one_class("target", target)
    return torch.ops.xent.row_targets(target, ignore_index=ignore_index), target


def at_least_one_class(name: str, ids: Tensor) -> None:
    if ids.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}: no class a row; expected (..., K), at least one")


def _save(ctx: Any, call: Call, output: tuple[Tensor, ...]) -> None:
    at_ids, lse, entropy, low = output
    ctx.mark_non_differentiable(low, *(() if call.with_entropy else (entropy,)))
    values = {"at_ids": at_ids, "lse": lse, "lse_low": low, "entropy": entropy if call.with_entropy else None}
    save_for(ctx, "token_logits_backward", call, **values)


def _backward(ctx: Any, grad_ids: Any, grad_lse: Any, grad_entropy: Any, _: None) -> GradientsByName:
    return {"logits": run_backward(ctx, None, grad_ids=grad_ids, grad_lse=grad_lse, grad_entropy=grad_entropy)}


operator("row_targets", reference_ids.row_targets, results={"target": ("int64", "...", "")})
operator("ids_forward", reference_ids.ids_forward)
operator("mask_ids_", reference_ids.mask_ids_, overwrites="logits")
operator("ids_grad_", reference_ids.ids_grad_, overwrites="grad_logits")

operator("token_logits", head_ids.token_logits, check_values=check_targets, calls_operators=True)
autograd("token_logits", _backward, _save)

operator("token_logits_backward", head_ids.token_logits_backward, calls_operators=True)
autograd("token_logits_backward", refuse_second_derivatives, save_nothing)
