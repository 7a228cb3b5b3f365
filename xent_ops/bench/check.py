"""Is a loss and its gradient right? Against float64 autograd of torch's own operators, a few rows at a time.

Errors are relative and a row's: a mean over 8192 rows makes every off-target gradient smaller than any absolute
tolerance, and one wrong row in 8192 is invisible in the norm of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
CHUNK = 1 << 22  # logits that are in float64 at a time: half a dozen copies of them, 32 MiB each


@dataclass(frozen=True)
class Options:
    """Terms of the loss beside plain cross entropy with a mean over counted rows."""

    weighted: bool = False
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    lse_square_scale: float = 0.0
    slack: float = 1.0  # times the tolerance, for a loss that rounds its logits several times


@dataclass(frozen=True)
class Verdict:
    loss_error: float  # relative
    grad_error: float  # the worst row's, relative; inf or nan where something is not finite or not zero
    tolerance: float
    head_error: float | None = None  # of a step: that of the gradient of W, relative, in the 2-norm
    hidden_error: float | None = None  # that of the gradient of the hidden states as a whole
    loss_tolerance: float | None = None  # where it is not that of the gradient
    loss: float | None = None  # itself, where a run reports it

    @property
    def ok(self) -> bool:
        # False for nan: see ``worst``.
        limit = self.tolerance if self.loss_tolerance is None else self.loss_tolerance
        return self.loss_error <= limit and self.grad_error <= self.tolerance

    def __str__(self) -> str:
        of_loss = "" if self.loss_tolerance is None else f" (tolerance {self.loss_tolerance:.1e})"
        return (
            f"relative error of the loss {self.loss_error:.1e}{of_loss}, of the gradient where it is worst "
            f"{self.grad_error:.1e}; tolerance {self.tolerance:.1e}"
        )


def tolerance(dtype: torch.dtype) -> float:
    """4 roundings to the logits' dtype (eager F.cross_entropy makes them), or what float32 exponentials lose."""
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    return max(4 * torch.finfo(dtype).eps, 64 * torch.finfo(accumulator).eps)


def worst(errors: list[Tensor]) -> float:
    """The largest; nan counts as inf, for a comparison with nan is False and max() may drop it."""
    return max(float(error.nan_to_num(nan=math.inf, posinf=math.inf).max()) for error in errors) if errors else 0.0


def chunks(rows: int, classes: int, logits: int | None = None) -> Iterator[slice]:
    """Rows that have so many logits, or CHUNK."""
    step = max(1, (logits or CHUNK) // classes)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


class Reference:
    """float64 loss and gradient of the logits, by chunks of rows."""

    def __init__(self, target: Tensor, weight: Tensor, options: Options) -> None:
        self.options = options
        self.target = target
        self.counted = target != IGNORE_INDEX
        self.weight = weight.double() if options.weighted else None
        self.number = self.counted.sum().double()
        self.denominator = self.number
        if self.weight is not None:
            self.denominator = torch.where(self.counted, self.weight[target.clamp(min=0)], 0.0).sum()

    def rows(self, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(what these rows add to the loss, the gradient of their logits); logits are those of the chunk."""
        options = self.options
        z = logits.detach().double().requires_grad_()
        x = options.logit_scale * z
        x = x if options.softcap is None else options.softcap * torch.tanh(x / options.softcap)
        target, counted = self.target[part], self.counted[part]
        losses = F.cross_entropy(
            x,
            target,
            self.weight,
            ignore_index=IGNORE_INDEX,
            reduction="none",
            label_smoothing=options.label_smoothing,
        )
        total = losses.sum() / self.denominator
        if options.lse_square_scale:
            lse = torch.where(counted, torch.logsumexp(x, 1), 0.0)
            total = total + options.lse_square_scale * lse.square().sum() / self.number
        (grad,) = torch.autograd.grad(total, z)
        return total.detach(), grad


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """In the 2-norm, without a second float64 tensor of this size."""
    squares = torch.zeros((), dtype=torch.float64, device=actual.device)
    step = max(1, CHUNK // expected.shape[1])
    for part, wanted in zip(actual.split(step), expected.split(step), strict=True):
        squares += (part.double() - wanted).square().sum()
    return squares.sqrt() / expected.norm()


def row_errors(actual: Tensor, expected: Tensor, target: Tensor, scale: Tensor, step: float) -> Tensor:
    """(rows,): the larger of the relative errors at the target and, in the 2-norm, away from it.

    ``scale`` is the size of a gradient at the target, ``step`` half the distance of subnormal numbers of the
    gradient's dtype. Ignored rows must be zeros.
    """
    difference = actual.double() - expected
    counted = target != IGNORE_INDEX
    index = torch.where(counted, target, 0).unsqueeze(1)
    at_target = (difference.gather(1, index).abs() - step).clamp(min=0)
    at_target = (at_target / expected.gather(1, index).abs().clamp(min=scale)).squeeze(1)
    difference.scatter_(1, index, 0.0)
    size = expected.scatter(1, index, 0.0).norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    elsewhere = (difference.norm(dim=1) - step * math.sqrt(difference.shape[1])).clamp(min=0) / size
    zero = (actual == 0).all(dim=1)
    return torch.where(counted, torch.maximum(at_target, elsewhere), torch.where(zero, 0.0, math.inf))


def compare(loss: Tensor, grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor, options: Options) -> Verdict:
    """``loss`` and ``grad`` of ``logits`` (rows, classes) against float64."""
    limit = tolerance(logits.dtype)
    if loss.shape != () or grad.shape != logits.shape or grad.dtype != logits.dtype:
        return Verdict(math.inf, math.inf, limit)
    reference = Reference(target, weight, options)
    step = torch.finfo(grad.dtype).tiny * torch.finfo(grad.dtype).eps / 2
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    errors = []
    for part in chunks(*logits.shape):
        share, expected = reference.rows(part, logits[part])
        total += share
        errors.append(row_errors(grad[part], expected, target[part], 1 / reference.denominator, step))
    loss_error = worst([(loss.detach().double() - total).abs() / total.abs()])
    return Verdict(loss_error, worst(errors), limit)
