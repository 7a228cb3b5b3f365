"""Launchers of the reduced loss and of its divisors; see launch.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..options import DEFAULTS, RowOptions
from ..reductions import counted_weights
from ..reference import accumulator
from ..rows import dense_like, optional_like
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
    flags: SumFlags,
    *,
    classes: int = 0,
    ignore_index: int = 0,
    lse_square_scale: float = 0.0,
) -> Callable[..., tuple[Tensor, ...]]:
    """``sums(*inputs)`` -> (value, divisors, square, accuracy), inputs and results of reduce_kernel.

    Pass any tensor for an input that is not read. A result that is not written is another one.
    """
    programs, config = configs.reduce(size_to_serve(number, configs.REDUCE_MOST_ROWS), dtype.itemsize)
    flags = flags._replace(
        lse_square=lse_square_scale != 0.0, partial=programs > 1, factors=flags.factors and programs == 1
    )
    new_value = new_tensor((number,) if flags.factors else (), dtype, device)
    new_number, new_divisors = new_tensor((), dtype, device), new_tensor((2,), dtype, device)
    with_square = flags.hits or (flags.lse_square and not flags.losses)
    numbers: tuple[Any, ...] = (number, classes, ignore_index, lse_square_scale)
    tiling = {"BLOCK": config.block, "num_warps": config.num_warps, "num_stages": config.num_stages}
    reduce = Launch(reduce_kernel, programs, *numbers, FLAGS=flags, **tiling)
    block, options = configs.REDUCE_MOST_PROGRAMS, {"num_warps": 4, "num_stages": 1}
    join = Launch(join_sums_kernel, 1, programs, lse_square_scale, FLAGS=flags, BLOCK=block, **options)
    new_parts = new_tensor((6, programs), dtype, device)

    def sums(*inputs: Tensor) -> tuple[Tensor, ...]:
        value = new_value()
        square = new_value() if with_square else value
        accuracy = new_number() if flags.hits else value
        divisors = value if flags.given == 2 else new_divisors()
        if programs == 1:
            reduce(*inputs, value, square, accuracy, divisors)
        else:
            parts = new_parts()
            reduce(*inputs, parts, square, accuracy, divisors)
            join(parts, inputs[-1], value, square, accuracy, divisors)
        return value, divisors, square, accuracy

    return sums


def prepare_sum(number: int, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The sum of a vector, for 128256 class weights in 8 us where torch's takes 32."""
    sums = _prepare_sums(number, dtype, device, SumFlags(losses=True))
    return lambda vector: sums(*(vector,) * 7)[0]


def prepare_reduce(
    logits: Tensor,
    target: Tensor,
    options: RowOptions,
    lse_square_scale: float,
    reduction: str,
    *,
    weighted: bool,
    row_weights: bool = False,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """``reduce(loss, lse, target, weight)`` -> (value, divisors), of dense losses and lses of the rows of ``logits``.

    ``weight``: of classes, or with ``row_weights`` of rows; any tensor where there are no weights.
    """
    flags = SumFlags(True, mean=reduction == "mean", targets=True, weights=weighted, row_weights=row_weights)
    like = (target.numel(), accumulator(logits), logits.device, flags)
    numbers: dict[str, Any] = {"ignore_index": options.ignore_index, "lse_square_scale": lse_square_scale}
    sums = _prepare_sums(*like, classes=logits.shape[-1], **numbers)
    as_targets = dense_like(target)

    def reduce(loss: Tensor, lse: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return sums(loss, lse, as_targets(target), weight, loss, loss, loss)[:2]

    return reduce


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
def row_divisors(
    target: Tensor,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    divisor: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> Run:
    dtype, device, shape, mean = dtype or torch.float32, target.device, target.shape, reduction == "mean"
    weighted, by_token = mean and weight is not None, token_weight is not None
    flags = SumFlags(targets=True, weights=weighted, token_weights=by_token, given=0 if mean else 1, factors=by_token)
    number, classes = target.numel() if mean or by_token else 0, 0 if weight is None else weight.shape[0]
    numbers: dict[str, Any] = {"ignore_index": options.ignore_index, "lse_square_scale": lse_square_scale}
    sums = _prepare_sums(number, dtype, device, flags, classes=classes, **numbers)
    as_targets = dense_like(target)
    as_weights, as_tokens = optional_like(weight, dtype), optional_like(token_weight)
    new_nothing = new_tensor((0,), dtype, device)

    def run(
        target: Tensor, weight: Tensor | None = None, token_weight: Tensor | None = None, divisor: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        targets = as_targets(target)
        weights, tokens = as_weights(weight, targets), as_tokens(token_weight, targets)
        given = targets if mean else torch.ones((), dtype=dtype, device=device) if divisor is None else divisor
        scale, divisors, square, _ = sums(targets, targets, targets, weights, tokens, targets, given)
        scales = [scale] if lse_square_scale == 0.0 else [scale, square]
        if token_weight is not None and scale.dim() > 0:
            scales = [one.view(shape) for one in scales]
        elif token_weight is not None:  # several programs had to add up the divisors first
            factors = counted_weights(token_weight, target, options.ignore_index, dtype)
            scales = [one * factors for one in scales]
        return divisors, scales[0], scales[1] if len(scales) == 2 else new_nothing()

    return run


@launcher
def row_summary(
    loss: Tensor,
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    divisors: Tensor | None = None,
    argmax: Tensor | None = None,
    *,
    options: RowOptions = DEFAULTS,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
) -> Run:
    dtype = accumulator(loss)
    given = 0 if divisors is None else 1 if divisors.stride(0) == 0 else 2  # 1: a number that was expanded
    flags = SumFlags(True, mean=reduction == "mean", targets=True, weights=weight is not None, given=given)
    flags = flags._replace(token_weights=token_weight is not None, hits=argmax is not None)
    like, classes = (target.numel(), dtype, loss.device), 0 if weight is None else weight.shape[0]
    numbers: dict[str, Any] = {"ignore_index": options.ignore_index, "lse_square_scale": lse_square_scale}
    sums = _prepare_sums(*like, flags, classes=classes, **numbers)
    as_loss, as_lse, as_targets = dense_like(loss), dense_like(lse), dense_like(target)
    as_weights, as_tokens, as_argmax = optional_like(weight, dtype), optional_like(token_weight), optional_like(argmax)
    as_divisors = dense_like(divisors) if divisors is not None and given == 2 else lambda divisors: divisors
    new_nothing = new_tensor((0,), dtype, loss.device)

    def run(
        loss: Tensor,
        lse: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        token_weight: Tensor | None = None,
        divisors: Tensor | None = None,
        argmax: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        weights, tokens, tops = as_weights(weight, loss), as_tokens(token_weight, loss), as_argmax(argmax, loss)
        by = loss if divisors is None else as_divisors(divisors)
        value, made, z_loss, accuracy = sums(as_loss(loss), as_lse(lse), as_targets(target), weights, tokens, tops, by)
        if argmax is None:
            z_loss, accuracy = new_nothing(), new_nothing()
        return value, made if divisors is None else new_nothing(), z_loss, accuracy

    return run
