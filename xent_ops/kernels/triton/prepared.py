"""The plain mean or sum of eager training: all that follows from the shapes of logits and targets is decided once.

What is left of a call is to allocate and to launch. Small losses take as long as the host does (docs/design.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import accumulator
from ..rows import rows
from .common import on_device_of
from .launch import backward_launch, forward_launches
from .launch_mean import mean_launches


def prepare(facts: Any, logits: Tensor, target: Tensor, mean: bool, **options: Any) -> Prepared | bool:
    """False where the tensors would have to be copied. They have passed the operators' checks, and are not empty."""
    if rows(logits).tensor is not logits or not target.is_contiguous():
        return False
    return Prepared(facts, logits, mean, **options)


class Prepared:
    def __init__(
        self,
        facts: Any,  # shapes, strides, dtypes and devices that this holds for (ops/eager.py)
        logits: Tensor,
        mean: bool,  # or the sum
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None,
        logit_scale: float,
    ) -> None:
        self.facts = facts
        self.device = logits.device
        view = rows(logits)
        options = (ignore_index, label_smoothing, softcap, logit_scale)
        self.number = view.number
        self.row_dtype = accumulator(logits)
        self.forward_launches = forward_launches(view, False, False, False, *options)
        self.mean_launches = mean_launches(self.number, True, ignore_index) if mean else None
        out = rows(torch.empty(logits.shape, device="meta"))
        self.blocks, self.backward_launch = backward_launch(
            view[2:], out[2:], logits.shape[-1], logits.element_size(), (0, 0, 0), False, False, False, None, *options
        )

    def fits(self, facts: Any, lse: Tensor) -> bool:
        """May ``backward`` be called with tensors of these facts, and this lse?"""
        same = facts == self.facts and lse.dtype == self.row_dtype and lse.device == self.device
        return same and lse.is_contiguous() and lse.numel() == self.number

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(loss, number of counted rows where they are what it is divided by, lse)"""
        rows_loss = torch.empty(target.shape, dtype=self.row_dtype, device=logits.device)
        lse = torch.empty_like(rows_loss)
        with on_device_of(logits):
            self.forward_launches(self.number, (logits, target, lse), (rows_loss, lse, lse, lse))
            if self.mean_launches is None:
                return rows_loss.sum(), None, lse
            loss = torch.empty((), dtype=self.row_dtype, device=logits.device)
            number = torch.empty_like(loss)
            self.mean_launches(self.number, rows_loss, target, loss, number)
        return loss, number, lse

    def backward(self, grad_loss: Tensor, logits: Tensor, target: Tensor, lse: Tensor) -> Tensor:
        """The gradient of the logits, from that of each row's loss, ()."""
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        with on_device_of(logits):
            self.backward_launch(
                self.number * self.blocks, grad_loss, lse, lse, logits, target, lse, lse, lse, lse, grad
            )
        return grad
