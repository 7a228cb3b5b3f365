"""Eager ``inplace_backward=True``: the backward writes the gradient over the logits' storage.

Safe because autograd's version counter watches it: a producer that saved its output, a second backward and
retain_graph all find a tensor that was modified in place, and raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def forward_rows(logits: Tensor, target: Tensor, weight: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """(loss, lse) as ``cross_entropy_forward`` returns them."""
    if logits.is_leaf and logits.requires_grad:
        raise RuntimeError(
            "inplace_backward=True would overwrite a leaf tensor that requires grad with its own gradient: "
            "pass the output of a layer, or leave inplace_backward off"
        )
    if any(stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True) if size > 1):
        raise RuntimeError("inplace_backward=True cannot write into expanded logits, whose rows share memory")
    return _Forward.apply(logits, target, weight, options)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        loss, lse = torch.ops.xent.cross_entropy_forward(logits, target, weight, **options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, target, lse, weight)
        ctx.options = options
        return loss, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_loss is None and grad_lse is None:
            return None, None, None, None
        logits, target, lse, weight = ctx.saved_tensors
        if grad_loss is None:
            grad_loss = lse.new_zeros(()).expand(lse.shape)
        torch.ops.xent.cross_entropy_backward_(grad_loss, grad_lse, logits, target, lse, weight, **ctx.options)
        return logits.detach(), None, None, None
