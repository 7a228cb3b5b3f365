"""The features that a kernel is compiled for, in one constexpr. A new feature is a new field: no signature changes.

Fields are bool or int: a float in an `if` does not compile. The values of options are arguments of the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from ..options import RowOptions
from . import configs


class Flags(NamedTuple):
    """The constexpr FLAGS of the kernels that read logits. A kernel that does not read a field leaves its default."""

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
    lse_low: bool = False  # forward: what the lse's rounding took is an output; backward: it is read

    def __repr__(self) -> str:
        return _expression(self)


def flags_of(options: RowOptions, weighted: bool, itemsize: int) -> Flags:
    """The flags that follow from the options. ``itemsize``: of the logits."""
    return Flags(weighted, options.label_smoothing > 0.0, configs.softcap(options.softcap, itemsize))


class DivergenceFlags(NamedTuple):
    """The constexpr MODE of divergences_kernel."""

    kl: bool
    reverse_kl: bool
    mixture: bool
    overlap: bool
    hard: int  # the log-probability of the target: 0 none, 1 at the divergences' temperature, 2 at another
    statistics: bool  # computed; else they are read
    again: bool  # a pass after the statistics
    gradient: bool
    fixed: bool  # of one loss, with one upstream gradient a row; else there is one for each value
    narrow: bool  # it is narrower than the logits, and written to the front of each row
    other: bool  # the overlap's teacher has another lse
    ragged: bool  # the number of columns is not a multiple of a lane's
    padded: bool  # there are columns behind the classes
    part: bool  # the columns are some of the classes; targets count from the first class of all

    def __repr__(self) -> str:
        return _expression(self)


class SumFlags(NamedTuple):
    """The constexpr FLAGS of reduce_kernel and join_sums_kernel."""

    losses: bool = False  # the value is a loss; else it is 1 / divisor
    lse_square: bool = False  # it includes a z-loss
    mean: bool = False  # it is divided
    targets: bool = False  # counted rows are counted; without targets the value is a plain sum of losses
    weights: bool = False  # rows are weighted
    row_weights: bool = False  # there is a weight for each row, not for each class
    partial: bool = False  # one of several programs; join_sums_kernel adds their sums
    token_weights: bool = False  # losses, lse^2, weights and counts of rows are multiplied by them
    given: int = 0  # the divisors are read: 1: one number for both; 2: two numbers
    hits: bool = False  # counted rows whose argmax is the target are counted
    factors: bool = False  # without losses: the quotients are multiplied by the token weights

    def __repr__(self) -> str:
        return _expression(self)


def _expression(flags: tuple[int, ...]) -> str:
    """An expression that rebuilds the flags in any module: Inductor writes constants into its source as they print."""
    return f"__import__({__name__!r}, fromlist=['']).{type(flags).__name__}{tuple(flags)}"
