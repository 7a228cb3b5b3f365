"""Launchers of the reduced loss and of its divisors; see launch.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..options import DEFAULTS, RowOptions
from ..reference import accumulator
from ..rows import dense_like
from ..sizes import size_to_serve
from . import configs
from .cached import Launch
from .common import Run, launcher, new_rows, new_tensor
from .flags import SumFlags
from .launch_forward import prepare_forward
from .reduce import join_sums_kernel, reduce_kernel


def _prepare_sums(
    number: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    classes: int = 0,
    ignore_index: int = 0,
    lse_square_scale: float = 0.0,
    losses: bool = True,
    targets: bool = True,
    weighted: bool = False,
    row_weights: bool = False,
    mean: bool = False,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """``sums(loss, lse, target, weight)`` -> (value, divisors), written by reduce_kernel.

    Pass any tensor for one that is not read.
    """
    value_shape = () if losses else (2,)
    new_value, new_divisor = new_tensor(value_shape, dtype, device), new_tensor((2,), dtype, device)
    programs, config = configs.reduce(size_to_serve(number, configs.REDUCE_MOST_ROWS), dtype.itemsize)
    flags = SumFlags(losses, lse_square_scale != 0.0, mean, targets, weighted, row_weights, programs > 1)
    reduce = Launch(
        reduce_kernel,
        programs,
        number,
        classes,
        ignore_index,
        lse_square_scale,
        FLAGS=flags,
        BLOCK=config.block,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if programs == 1:

        def sums(loss: Tensor, lse: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            value, divisors = new_value(), new_divisor()
            reduce(loss, lse, target, weight, value, divisors)
            return value, divisors

        return sums
    block, options = configs.REDUCE_MOST_PROGRAMS, {"num_warps": 4, "num_stages": 1}
    join = Launch(join_sums_kernel, 1, programs, lse_square_scale, FLAGS=flags, BLOCK=block, **options)
    new_parts = new_tensor((4, programs), dtype, device)

    def sums_of_parts(loss: Tensor, lse: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        value, divisors, parts = new_value(), new_divisor(), new_parts()
        reduce(loss, lse, target, weight, parts, divisors)
        join(parts, value, divisors)
        return value, divisors

    return sums_of_parts


def prepare_sum(number: int, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The sum of a vector, for 128256 class weights in 8 us where torch's takes 32."""
    sums = _prepare_sums(number, dtype, device, targets=False)
    return lambda vector: sums(vector, vector, vector, vector)[0]


def prepare_reduce(
    logits: Tensor,
    target: Tensor,
    options: RowOptions,
    lse_square_scale: float,
    reduction: str,
    *,
    weighted: bool,
    row_weights: bool = False,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``reduce(loss, lse, target, weight)`` -> (value, divisors), of dense losses and lses of the rows of ``logits``.

    ``weight``: of classes, or with ``row_weights`` of rows; any tensor where there are no weights.
    """
    sums = _prepare_sums(
        target.numel(),
        accumulator(logits),
        logits.device,
        classes=logits.shape[-1],
        ignore_index=options.ignore_index,
        lse_square_scale=lse_square_scale,
        weighted=weighted,
        row_weights=row_weights,
        mean=reduction == "mean",
    )
    as_targets = dense_like(target)
    return lambda loss, lse, target, weight: sums(loss, lse, as_targets(target), weight)


@launcher
def cross_entropy_reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
) -> Run:
    forward = prepare_forward(logits, target, weight, options, skip_ignored=True)
    reduce = prepare_reduce(logits, target, options, lse_square_scale, reduction, weighted=weight is not None)
    as_weights = None if weight is None else dense_like(weight, accumulator(logits))
    new_row = new_rows(logits)

    def run(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if as_weights is not None and weight is not None:
            weight = as_weights(weight)  # once for both
        loss, lse, lse_low = new_row(), new_row(), new_row()
        forward(logits, target, weight, loss, lse, lse, lse, lse_low)
        value, divisors = reduce(loss, lse, target, lse if weight is None else weight)
        return value, divisors, lse, lse_low

    return run


@launcher
def cross_entropy_divisor(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, options: RowOptions = DEFAULTS
) -> Run:
    dtype = accumulator(logits)
    sums = _prepare_sums(
        target.numel(),
        dtype,
        logits.device,
        classes=logits.shape[-1],
        ignore_index=options.ignore_index,
        losses=False,
        weighted=weight is not None,
    )
    as_targets = dense_like(target)
    as_weights = None if weight is None else dense_like(weight, dtype)

    def run(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        target = as_targets(target)
        weights = target if as_weights is None or weight is None else as_weights(weight)
        inverse, divisors = sums(target, target, target, weights)
        return divisors, inverse

    return run
