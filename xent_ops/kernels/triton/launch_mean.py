"""Launcher of the mean of row losses; see launch.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rows import dense
from . import configs
from .cached import Bound, Launch, plan
from .common import on_device_of
from .mean import mean_kernel


class MeanLaunches(NamedTuple):
    kernel: Launch
    programs: int = 1  # that share the rows
    join: Launch | None = None  # of their parts

    def bound(self) -> MeanLaunches:
        return self._replace(kernel=Bound(self.kernel), join=self.join and Bound(self.join))

    def __call__(self, number: int, loss: Tensor, row: Tensor, value: Tensor, divisor: Tensor) -> None:
        if self.join is None:
            self.kernel(1, loss, row, value, divisor, varying=(number,))
        else:
            sums, counts = torch.empty((2, self.programs), dtype=divisor.dtype, device=divisor.device)
            self.kernel(self.programs, loss, row, sums, counts, varying=(number,))
            self.join(1, sums, counts, value, divisor, varying=(self.programs,))


def mean(loss: Tensor, row: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """(sum of losses / divisor, divisor), both (): the number of rows whose target ``row`` is not ``ignore_index``.

    With ``ignore_index=None`` the divisor is the sum of ``row``, which holds what each row counts.
    """
    value = torch.empty((), dtype=loss.dtype, device=loss.device)
    divisor = torch.empty_like(value)
    number = loss.numel()
    with on_device_of(loss):
        mean_launches(number, True, ignore_index)(number, dense(loss), dense(row), value, divisor)
    return value, divisor


def count(target: Tensor, ignore_index: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(1 / divisor, divisor), before there are losses.

    With ``ignore_index=None`` the divisor is the sum of ``target``.
    """
    inverse = torch.empty((), dtype=dtype, device=target.device)
    divisor = torch.empty_like(inverse)
    number = target.numel()
    with on_device_of(target):
        mean_launches(number, False, ignore_index)(number, divisor, dense(target), inverse, divisor)
    return inverse, divisor


@plan
def mean_launches(number: int, with_loss: bool, ignore_index: int | None) -> MeanLaunches:
    programs = configs.mean_programs(number)
    if programs == 1:
        return MeanLaunches(_launch(with_loss, ignore_index, False, configs.MEAN))
    parts = _launch(with_loss, ignore_index, True, configs.MEAN_PART)
    return MeanLaunches(parts, programs, _launch(with_loss, None, False, configs.MEAN_PART))


@plan
def _launch(with_loss: bool, ignore_index: int | None, partial: bool, config: configs.Config) -> Launch:
    weights = ignore_index is None
    return Launch(
        mean_kernel,
        0 if weights else ignore_index,
        varying=1,
        HAS_LOSS=with_loss,
        ROW_WEIGHTS=weights,
        PARTIAL=partial,
        BLOCK=config.block,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
