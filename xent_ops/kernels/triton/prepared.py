"""The plain mean or sum of eager training: all that follows from the shapes of logits and targets is decided once.

What is left of a call is to allocate and to launch. Small losses take as long as the host does (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import reference_shard
from ..reference import accumulator
from ..rows import rows
from .common import on_device_of
from .launch import backward_launch, forward_launches
from .launch_mean import MeanLaunches, mean_launches
from .launch_shard import JOIN_BLOCK, join_launch, shard_launch

Options = tuple[int, float, float | None, float]  # ignore_index, label_smoothing, softcap, logit_scale


def prepare(
    logits: Tensor,
    target: Tensor,
    mean: bool,  # or the sum
    *,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> Prepared | None:
    """None where the tensors would have to be copied. They have passed the operators' checks, and are not empty."""
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    return PreparedRows(logits, mean, options) if _in_place(logits, target) else None


def prepare_shard(
    logits: Tensor,
    target: Tensor,
    mean: bool,
    class_start: int,
    num_classes: int,
    world: int,
    gather: Callable[[Tensor], Tensor],  # hands over what every rank's ``cross_entropy_shard`` made
    *,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> Prepared | None:
    """Likewise, of a shard of the vocabulary; nor where it holds no class, or padding."""
    columns = reference_shard.columns_of(logits, class_start, num_classes)
    if columns == 0 or columns != logits.shape[-1] or not _in_place(logits, target):
        return None
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    return PreparedShard(logits, mean, options, (class_start, num_classes), world, gather)


def _in_place(logits: Tensor, target: Tensor) -> bool:
    return rows(logits).tensor is logits and target.is_contiguous()


class Prepared:
    """Mean or sum, and the backward; how the rows' losses are made is a subclass's."""

    def __init__(
        self,
        logits: Tensor,
        options: Options,
        mean: MeanLaunches | None,
        shard: tuple[int, int] | None,  # class_start, num_classes
    ) -> None:
        # Tuples, for torch.empty takes twice as long with a torch.Size.
        self.shape, self.rows_shape = tuple(logits.shape), tuple(logits.shape[:-1])
        self.device, self.dtype, self.row_dtype = logits.device, logits.dtype, accumulator(logits)
        view, out = rows(logits), rows(torch.empty(logits.shape, device="meta"))
        self.number = view.number
        self.mean_launches = mean
        place = (view[2:], out[2:], logits.shape[-1], logits.element_size(), (0, 0, 0))
        divided = mean is not None
        self.blocks, self.backward_launch = backward_launch(*place, False, False, False, shard, *options, divided)

    def fits(self, lse: Tensor, number: Tensor | None) -> bool:
        """May ``backward`` be called with these?"""
        same = lse.dtype == self.row_dtype and lse.device == self.device
        if number is not None:
            same &= number.dtype == self.row_dtype and number.device == self.device
        return same and lse.is_contiguous() and lse.numel() == self.number

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(loss, number of counted rows where they are what it is divided by, lse)"""
        raise NotImplementedError

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


class PreparedRows(Prepared):
    def __init__(self, logits: Tensor, mean: bool, options: Options) -> None:
        view = rows(logits)
        super().__init__(logits, options, mean_launches(view.number, True, options[0]) if mean else None, None)
        self.forward_launches = forward_launches(view, False, False, False, *options)

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        rows_loss = torch.empty(self.rows_shape, dtype=self.row_dtype, device=self.device)
        lse = torch.empty_like(rows_loss)
        with on_device_of(logits):
            self.forward_launches(self.number, (logits, target, lse), (rows_loss, lse, lse, lse))
            return *self.reduce(rows_loss, target), lse


class PreparedShard(Prepared):
    def __init__(
        self,
        logits: Tensor,
        mean: bool,
        options: Options,
        shard: tuple[int, int],
        world: int,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        view = rows(logits)
        # Rows count by the weight of their target.
        super().__init__(logits, options, mean_launches(view.number, True, None) if mean else None, shard)
        self.gather = gather
        self.width = reference_shard.width(self.number, False)
        ignore_index, label_smoothing, *rest = options
        place = (logits.shape[-1], *shard)
        self.shard_launch = shard_launch(view[2:], place, logits.element_size(), False, label_smoothing, *rest)
        self.join_launch = join_launch(world, shard[1], False, ignore_index, label_smoothing)

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        part = torch.empty((1, self.width), dtype=self.row_dtype, device=self.device)
        with on_device_of(logits):
            self.shard_launch(self.number, logits, target, part, part)
            gathered = self.gather(part)
            loss = torch.empty(self.rows_shape, dtype=self.row_dtype, device=self.device)
            lse, counted, coefficient = torch.empty_like(loss), torch.empty_like(loss), torch.empty_like(loss)
            blocks = -(-self.number // JOIN_BLOCK)
            self.join_launch(blocks, gathered, target, loss, lse, counted, coefficient, varying=(self.number,))
            return *self.reduce(loss, counted), lse
