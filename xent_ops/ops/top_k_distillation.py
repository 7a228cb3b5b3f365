"""The loss of rows that learn a teacher's probabilities of a few classes, from x of these classes and an lse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import reference_top_k_distillation
from ..kernels.reductions import times
from .contract import Call
from .formulas import GradientsByName, autograd
from .library import operator
from .second_order import no_second_derivative


def _save(ctx: Any, call: Call, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _loss, grad_ids, grad_lse = output
    ctx.mark_non_differentiable(grad_ids, grad_lse)
    ctx.save_for_backward(grad_ids, grad_lse)


def _backward(ctx: Any, grad: Tensor, *_: None) -> GradientsByName:
    if torch.is_grad_enabled():  # create_graph=True
        no_second_derivative()
    grad_ids, grad_lse = ctx.saved_tensors
    return {"at_ids": times(grad.unsqueeze(-1), grad_ids), "lse": times(grad, grad_lse)}


operator(
    "top_k_distillation",
    reference_top_k_distillation.top_k_distillation,
    results={
        "loss": ("=at_ids", "...", ""),
        "grad_ids": ("=at_ids", "... K", ""),
        "grad_lse": ("=at_ids", "...", ""),
    },
)
autograd("top_k_distillation", _backward, _save)
