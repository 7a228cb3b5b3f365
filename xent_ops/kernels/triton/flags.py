"""What kernels are compiled for, as one constexpr: another feature is one more field, and no signature changes.

Fields are bool or int: a float in an `if` does not compile. The values of options are arguments of the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from ..options import RowOptions
from . import configs


class Flags(NamedTuple):
    """The constexpr FLAGS of the kernels that visit logits. What a kernel does not look at stays as it is here."""

    weight: bool = False  # class weights
    smoothing: bool = False
    softcap: int = 0  # see configs.softcap
    argmax: bool = False
    entropy: bool = False  # forward: an output; backward: a gradient flows back from it
    grad_lse: bool = False
    lse_square: bool = False  # the gradient of a z-loss
    divisor: bool = False  # gradients of losses are divided
    skip_ignored: bool = False  # forward: logits of ignored rows are not read, and their lse is infinite
    shard: bool = False  # the columns are some of the classes; targets count from the first class of all

    def __repr__(self) -> str:
        return _expression(self)


def flags_of(options: RowOptions, weighted: bool, itemsize: int) -> Flags:
    """What follows from the options, of logits with elements of so many bytes."""
    return Flags(weighted, options.label_smoothing > 0.0, configs.softcap(options.softcap, itemsize))


class DistillationFlags(NamedTuple):
    """The constexpr HOW of distillation_kernel."""

    beta: int  # 0, 1, or 2 for what is in between
    hard: int  # cross entropy on the target: 0 for none, 2 where its temperature is another than the divergence's
    statistics: bool  # made; else they are read
    divergence: bool  # to the mixture, which is known after the statistics
    gradient: bool
    rest: bool  # columns are no multiple of those of a lane
    padded: bool  # there are columns behind the classes
    part: bool  # the columns are some of the classes; targets count from the first class of all

    def __repr__(self) -> str:
        return _expression(self)


class SumFlags(NamedTuple):
    """The constexpr FLAGS of reduce_kernel and join_sums_kernel."""

    losses: bool  # the value is a loss; else it is 1 / divisor
    lse_square: bool  # it includes a z-loss
    mean: bool  # it is divided
    targets: bool  # counted rows are counted; without targets the value is a plain sum of losses
    weights: bool  # rows count as much as their weights say
    row_weights: bool  # there is a weight for each row, not for each class
    partial: bool  # the sums of one of several programs, which join_sums_kernel adds

    def __repr__(self) -> str:
        return _expression(self)


def _expression(flags: tuple[int, ...]) -> str:
    """What makes them, wherever it stands: Inductor writes constants into the source of a module as they print."""
    return f"__import__({__name__!r}, fromlist=['']).{type(flags).__name__}{tuple(flags)}"
