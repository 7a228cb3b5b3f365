"""Compares a loss and its gradient with float64 autograd of torch's own operators, a few rows at a time.

Each row has its own relative error. A mean over 8192 rows makes every off-target gradient smaller than any absolute
tolerance, and one wrong row in 8192 does not show in the norm of the whole gradient. An error is relative to the
largest term of the row's gradient: with label smoothing a gradient is the difference of two terms, often nearly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..testing.rows import activated

IGNORE_INDEX = -100
CHUNK = 1 << 22  # logits held in float64 at a time: half a dozen copies of them, 32 MiB each
# (float64 logits of rows, positions of these rows) -> their part of the loss
Share = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True)
class Options:
    """Additions to plain cross entropy, whose mean is over the rows that are not ignored."""

    weighted: bool = False
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    lse_square_scale: float = 0.0


PLAIN = Options()


@dataclass(frozen=True)
class Verdict:
    """Relative errors and their limits, by name. An error is inf if a value is not finite, or not zero as required."""

    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(error <= self.limits[name] for name, error in self.errors.items())

    def __str__(self) -> str:
        return ", ".join(
            f"relative error of {name} {error:.1e}, tolerance {self.limits[name]:.1e}"
            for name, error in self.errors.items()
            if not error <= self.limits[name]
        )


def tolerance(dtype: torch.dtype) -> float:
    """4 roundings to the logits' dtype, as in eager F.cross_entropy; at least the error of float32 exponentials."""
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    return max(4 * torch.finfo(dtype).eps, 64 * torch.finfo(accumulator).eps)


def worst(*errors: Tensor) -> float:
    """The largest error. nan counts as inf, because a comparison with nan is False and max() may drop it."""
    return max(float(error.nan_to_num(nan=math.inf, posinf=math.inf).max()) for error in errors)


def chunks(rows: int, classes: int, logits: int | None = None) -> Iterator[slice]:
    """Slices of rows with at most ``logits`` logits each; the default is CHUNK."""
    step = max(1, (logits or CHUNK) // classes)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def divisor(target: Tensor, weight: Tensor, options: Options) -> Tensor:
    """The divisor of the mean."""
    counted = (target != IGNORE_INDEX).double()
    return (counted * weight.double()[target.clamp(min=0)]).sum() if options.weighted else counted.sum()


def cross_entropy(target: Tensor, weight: Tensor, options: Options) -> Share:
    counted = target != IGNORE_INDEX
    wide = weight.double() if options.weighted else None
    denominator = divisor(target, weight, options)

    def share(logits: Tensor, part: slice) -> Tensor:
        x = activated(logits, options.softcap, options.logit_scale).x
        losses = F.cross_entropy(x, target[part], wide, None, IGNORE_INDEX, None, "none", options.label_smoothing)
        total = losses.sum() / denominator
        if options.lse_square_scale:
            lse = torch.where(counted[part], torch.logsumexp(x, 1), 0.0)
            total = total + options.lse_square_scale * lse.square().sum() / counted.sum()
        return total

    return share


def mean(rows: Callable[[Tensor, slice], Tensor], target: Tensor) -> Share:
    """The mean of ``rows`` over the rows that are not ignored."""
    counted = target != IGNORE_INDEX

    def share(logits: Tensor, part: slice) -> Tensor:
        return torch.where(counted[part], rows(logits, part), 0.0).sum() / counted.sum().double()

    return share


def differentiated(share: Share, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """(the part of the loss from these rows, the gradient of their logits), float64."""
    z = logits.detach().double().requires_grad_()
    value = share(z, part)
    (grad,) = torch.autograd.grad(value, z)
    return value.detach(), grad


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """The relative error in the 2-norm, without a second float64 tensor of this size."""
    if actual.shape != expected.shape:
        return torch.tensor(math.inf)
    squares = torch.zeros((), dtype=torch.float64, device=actual.device)
    step = max(1, CHUNK // expected.shape[1])
    for part, wanted in zip(actual.split(step), expected.split(step), strict=True):
        squares += (part.double() - wanted).square().sum()
    return squares.sqrt() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny)


def smoothing_term(weight: Tensor, options: Options, scale: Tensor) -> Tensor:
    """(): the 2-norm over the classes of the term that label smoothing subtracts from a row's gradient."""
    weights = weight.double() if options.weighted else torch.ones_like(weight, dtype=torch.float64)
    return scale * options.label_smoothing / weight.numel() * weights.norm()


def row_errors(
    actual: Tensor, expected: Tensor, target: Tensor, scale: Tensor, step: float, smoothing: Tensor
) -> Tensor:
    """(rows,): the larger of the relative errors at the target and, in the 2-norm, away from it.

    ``scale`` is the size of a gradient at the target. ``step`` is half the distance of subnormal numbers of the
    gradient's dtype. ``smoothing`` comes from ``smoothing_term``. Ignored rows must be zeros.
    """
    difference = actual.double() - expected
    counted = target != IGNORE_INDEX
    index = torch.where(counted, target, 0).unsqueeze(1)
    at_target = (difference.gather(1, index).abs() - step).clamp(min=0)
    at_target = (at_target / expected.gather(1, index).abs().clamp(min=scale)).squeeze(1)
    difference.scatter_(1, index, 0.0)
    size = expected.scatter(1, index, 0.0).norm(dim=1).clamp(min=smoothing.clamp(min=torch.finfo(torch.float64).tiny))
    elsewhere = (difference.norm(dim=1) - step * math.sqrt(difference.shape[1])).clamp(min=0) / size
    zero = (actual == 0).all(dim=1)
    return torch.where(counted, torch.maximum(at_target, elsewhere), torch.where(zero, 0.0, math.inf))
