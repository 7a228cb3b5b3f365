"""Launcher of the mean of row losses; see launch.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows import dense
from .cached import Launch, plan
from .common import on_device_of
from .mean import mean_kernel

BLOCK, WARPS = 4096, 16  # 8 rows a thread: 8192 rows are two rounds of loads


def mean(loss: Tensor, row: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """(sum of losses / divisor, divisor), both (): the number of rows whose target ``row`` is not ``ignore_index``.

    With ``ignore_index=None`` the divisor is the sum of ``row``, which holds what each row counts.
    """
    value = torch.empty((), dtype=loss.dtype, device=loss.device)
    divisor = torch.empty_like(value)
    with on_device_of(loss):
        mean_launch(True, ignore_index)(1, dense(loss), dense(row), value, divisor, varying=(loss.numel(),))
    return value, divisor


def count(target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The divisor alone."""
    divisor = torch.empty((), dtype=dtype, device=target.device)
    with on_device_of(target):
        mean_launch(False, ignore_index)(1, divisor, dense(target), divisor, divisor, varying=(target.numel(),))
    return divisor


@plan
def mean_launch(with_loss: bool, ignore_index: int | None) -> Launch:
    weights = ignore_index is None
    constants = {"HAS_LOSS": with_loss, "ROW_WEIGHTS": weights, "BLOCK": BLOCK}
    return Launch(mean_kernel, 0 if weights else ignore_index, varying=1, **constants, num_warps=WARPS, num_stages=1)
