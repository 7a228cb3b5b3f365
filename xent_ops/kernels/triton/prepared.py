"""The plain mean or sum of eager training: all that follows from the shapes of logits and targets is decided once.

What is left of a call is to allocate and to launch. Small losses take as long as the host does (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference_shard
from ..reference import accumulator
from ..rows import rows
from .common import on_device_of
from .launch import backward_launch, forward_launches
from .launch_mean import mean_launches
from .launch_shard import JOIN_BLOCK, join_launch, shard_launch


def prepare(logits: Tensor, target: Tensor, mean: bool, **options: Any) -> Prepared | None:
    """None where the tensors would have to be copied. They have passed the operators' checks, and are not empty."""
    return Prepared(logits, mean, **options) if _in_place(logits, target) else None


def prepare_shard(
    logits: Tensor, target: Tensor, mean: bool, class_start: int, num_classes: int, **rest: Any
) -> PreparedShard | None:
    """Likewise, of a shard of the vocabulary; nor where it holds no class, or padding."""
    columns = reference_shard.columns_of(logits, class_start, num_classes)
    if columns == 0 or columns != logits.shape[-1] or not _in_place(logits, target):
        return None
    return PreparedShard(logits, mean, class_start, num_classes, **rest)


def _in_place(logits: Tensor, target: Tensor) -> bool:
    return rows(logits).tensor is logits and target.is_contiguous()


class Prepared:
    def __init__(
        self,
        logits: Tensor,
        mean: bool,  # or the sum
        shard: tuple[int, int] | None = None,  # class_start, num_classes
        *,
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None,
        logit_scale: float,
    ) -> None:
        options = (ignore_index, label_smoothing, softcap, logit_scale)
        # Tuples, for torch.empty takes twice as long with a torch.Size.
        self.shape, self.rows_shape = tuple(logits.shape), tuple(logits.shape[:-1])
        self.device, self.dtype, self.row_dtype = logits.device, logits.dtype, accumulator(logits)
        view = rows(logits)
        self.number = view.number
        if shard is None:
            self.forward_launches = forward_launches(view, False, False, False, *options)
        counted = ignore_index if shard is None else None  # else by the weights of the rows
        self.mean_launches = mean_launches(self.number, True, counted) if mean else None
        out = rows(torch.empty(logits.shape, device="meta"))
        place = (view[2:], out[2:], logits.shape[-1], logits.element_size(), (0, 0, 0))
        self.blocks, self.backward_launch = backward_launch(*place, False, False, False, shard, *options, mean)

    def fits(self, lse: Tensor, number: Tensor | None) -> bool:
        """May ``backward`` be called with these?"""
        same = lse.dtype == self.row_dtype and lse.device == self.device
        if number is not None:
            same &= number.dtype == self.row_dtype and number.device == self.device
        return same and lse.is_contiguous() and lse.numel() == self.number

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(loss, number of counted rows where they are what it is divided by, lse)"""
        rows_loss = torch.empty(self.rows_shape, dtype=self.row_dtype, device=self.device)
        lse = torch.empty_like(rows_loss)
        with on_device_of(logits):
            self.forward_launches(self.number, (logits, target, lse), (rows_loss, lse, lse, lse))
            return *self.reduce(rows_loss, target), lse

    def reduce(self, rows_loss: Tensor, row: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.mean_launches is None:
            return rows_loss.sum(), None
        loss = torch.empty((), dtype=self.row_dtype, device=self.device)
        number = torch.empty_like(loss)
        self.mean_launches(self.number, rows_loss, row, loss, number)
        return loss, number

    def backward(
        self,
        grad_loss: Tensor,
        number: Tensor | None,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the logits; that of each row's loss is ``grad_loss``, (), divided by ``number``.

        ``out``: where to write it, of the same strides, maybe over contiguous logits.
        """
        grad = torch.empty(self.shape, dtype=self.dtype, device=self.device) if out is None else out
        with on_device_of(logits):
            rest = (lse, lse, logits, target, lse, lse, lse, lse, grad)
            self.backward_launch(self.number * self.blocks, grad_loss, lse if number is None else number, *rest)
        if out is not None:
            torch.autograd.graph.increment_version(out)  # a launch is not seen by autograd
        return grad


class PreparedShard(Prepared):
    """Of a rank's columns; ``gather`` hands over what every rank's ``cross_entropy_shard`` made."""

    def __init__(
        self,
        logits: Tensor,
        mean: bool,
        class_start: int,
        num_classes: int,
        world: int,
        gather: Callable[[Tensor], Tensor],
        *,
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None,
        logit_scale: float,
    ) -> None:
        super().__init__(
            logits,
            mean,
            (class_start, num_classes),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            logit_scale=logit_scale,
        )
        self.gather = gather
        self.width = reference_shard.width(self.number, False)
        place = (logits.shape[-1], class_start, num_classes)
        options = (label_smoothing, softcap, logit_scale)
        self.shard_launch = shard_launch(rows(logits)[2:], place, logits.element_size(), False, *options)
        self.join_launch = join_launch(world, num_classes, False, ignore_index, label_smoothing)

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(loss, number of counted rows where they are what it is divided by, lse)"""
        part = torch.empty((1, self.width), dtype=self.row_dtype, device=self.device)
        with on_device_of(logits):
            self.shard_launch(self.number, logits, target, part, part)
            gathered = self.gather(part)
            loss = torch.empty(self.rows_shape, dtype=self.row_dtype, device=self.device)
            lse, counted, coefficient = torch.empty_like(loss), torch.empty_like(loss), torch.empty_like(loss)
            blocks = -(-self.number // JOIN_BLOCK)
            self.join_launch(blocks, gathered, target, loss, lse, counted, coefficient, varying=(self.number,))
            return *self.reduce(loss, counted), lse
