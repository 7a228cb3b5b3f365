"""The plain mean or sum of eager training: all that follows from the shapes of logits and targets is decided once.

What is left of a call is to allocate and to launch. Small losses take as long as the host does (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import reference_shard
from ..reference import accumulator
from ..rows import dense_rows, rows
from .cached import Bound
from .common import elsewhere, empty_like, place
from .launch import backward_launch, forward_launches
from .launch_mean import mean_launches
from .launch_shard import join_blocks, join_launch, shard_launch

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
    gather: Callable[[Tensor, Tensor], None],  # into (ranks, n), of each rank's (1, n)
    *,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
) -> Prepared | None:
    """Likewise, of a shard of the vocabulary; nor where it holds no class, or padding, or there are no rows."""
    columns = reference_shard.columns_of(logits, class_start, num_classes)
    if logits.numel() == 0 or columns != logits.shape[-1] or not _in_place(logits, target):
        return None
    options = (ignore_index, label_smoothing, softcap, logit_scale)
    return PreparedShard(logits, mean, options, (class_start, num_classes), world, gather)


def _in_place(logits: Tensor, target: Tensor) -> bool:
    return rows(logits).tensor is logits and target.is_contiguous()


class Prepared:
    """The backward of a mean or sum; the forward is a subclass's."""

    def __init__(
        self,
        logits: Tensor,
        mean: bool,
        options: Options,
        shard: tuple[int, int] | None = None,  # class_start, num_classes
    ) -> None:
        self.device, self.dtype, self.row_dtype = logits.device, logits.dtype, accumulator(logits)
        self.index = logits.get_device()
        view = rows(logits)
        self.number = view.number
        self.empty = empty_like(logits)
        self.grad_place = place(logits.shape, self.dtype)
        self.row_place = place(logits.shape[:-1], self.row_dtype)
        layout = (view[2:], dense_rows(logits.shape), logits.shape[-1], logits.element_size(), (0, 0, 0))
        self.blocks, launch = backward_launch(*layout, False, False, False, shard, *options, mean)
        self.backward_launch = Bound(launch)

    def empty_row(self) -> Tensor:
        """One value a row."""
        return self.empty(*self.row_place)

    def empty_number(self) -> Tensor:
        return self.empty((), (), self.row_dtype)

    def fits(self, lse: Tensor, number: Tensor | None) -> bool:
        """May ``backward`` be called with these? What the engine hands it has the loss's dtype and device."""
        numbers = (lse,) if number is None else (lse, number)
        same = all(tensor.dtype == self.row_dtype and tensor.device == self.device for tensor in numbers)
        return same and lse.is_contiguous() and lse.numel() == self.number

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(loss, number of counted rows where they are what it is divided by, lse)"""
        if elsewhere(self.index):
            with torch.cuda.device(self.index):
                return self._forward(logits, target)
        return self._forward(logits, target)

    def _forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        raise NotImplementedError

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
        if elsewhere(self.index):
            with torch.cuda.device(self.index):
                return self.backward(grad_loss, number, logits, target, lse, out)
        grad = self.empty(*self.grad_place) if out is None else out
        rest = (lse, lse, logits, target, lse, lse, lse, lse, grad)
        self.backward_launch(self.number * self.blocks, grad_loss, lse if number is None else number, *rest)
        if out is not None:
            torch.autograd.graph.increment_version(out)  # a launch is not seen by autograd
        return grad


class PreparedRows(Prepared):
    def __init__(self, logits: Tensor, mean: bool, options: Options) -> None:
        view = rows(logits)
        super().__init__(logits, mean, options)
        self.forward_launches = forward_launches(view, False, False, False, *options).bound()
        self.mean_launches = mean_launches(view.number, True, options[0]).bound() if mean else None

    def _forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        rows_loss, lse = self.empty_row(), self.empty_row()
        self.forward_launches(self.number, (logits, target, lse), (rows_loss, lse, lse, lse))
        if self.mean_launches is None:
            return rows_loss.sum(), None, lse
        loss, number = self.empty_number(), self.empty_number()
        self.mean_launches(self.number, rows_loss, target, loss, number)
        return loss, number, lse


class PreparedShard(Prepared):
    def __init__(
        self,
        logits: Tensor,
        mean: bool,
        options: Options,
        shard: tuple[int, int],
        world: int,
        gather: Callable[[Tensor, Tensor], None],
    ) -> None:
        super().__init__(logits, mean, options, shard)
        self.mean, self.world, self.gather = mean, world, gather
        width = reference_shard.width(self.number, False)
        self.part_place, self.everyones_place = (place((n, width), self.row_dtype) for n in (1, world))
        ignore_index, label_smoothing, *rest = options
        strides, columns = rows(logits)[2:], (logits.shape[-1], *shard)
        launch = shard_launch(strides, columns, logits.element_size(), False, True, label_smoothing, *rest)
        self.shard_launch = Bound(launch)
        reduction = "mean" if mean else "sum"
        self.join_launch = Bound(join_launch(world, shard[1], False, reduction, ignore_index, label_smoothing))
        self.join_blocks = join_blocks(self.number)

    def _forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        part = everyones = self.empty(*self.part_place)
        loss, number, lse = self.empty_number(), self.empty_number(), self.empty_row()
        self.shard_launch(self.number, logits, target, part, part, number)
        if self.world > 1:
            everyones = self.empty(*self.everyones_place)
            self.gather(everyones, part)
        self.join_launch(self.join_blocks, everyones, target, loss, lse, number, lse, varying=(self.number,))
        return loss, number if self.mean else None, lse
