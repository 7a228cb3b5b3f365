"""``--token-loss topk``: a teacher's 64 most probable classes and what they leave over, as one more class."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops

from . import check
from .linear_cases import LinearVariant
from .linear_problem import LinearProblem
from .sizes import HeadShape

NAME = "topk"
CLASSES = 64


def _ours(hidden: Tensor, matrix: Tensor, _: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return xent_ops.linear_cross_entropy(hidden, matrix, ids, target_probs=probs, tail=True)


def _of_rows(log_q: Tensor, probs: Tensor) -> Tensor:
    """Of log-probabilities of the ids, (..., K)."""
    left = torch.log((1 - log_q.exp().sum(-1)).clamp(min=torch.finfo(log_q.dtype).eps))
    return -(probs * log_q).sum(-1) - (1 - probs.sum(-1)) * left


def _mean(rows: Tensor, target: Tensor) -> Tensor:
    counted = target != check.IGNORE_INDEX
    return torch.where(counted, rows, 0.0).sum() / counted.sum()


def _by_log_probs(hidden: Tensor, matrix: Tensor, target: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return _mean(_of_rows(xent_ops.linear_token_log_probs(hidden, matrix, ids).log_probs, probs), target)


def _in_torch(hidden: Tensor, matrix: Tensor, target: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    log_q = F.linear(hidden, matrix).float().log_softmax(-1)
    return _mean(_of_rows(log_q.gather(-1, ids.clamp(min=0)), probs), target)


def variants() -> list[LinearVariant]:
    ways: list[tuple[str, str, Any, bool]] = [
        ("xent target_probs eager", "ours", _ours, False),
        ("xent target_probs compiled", "ours", _ours, True),
        ("xent log-probs compiled", "ours", _by_log_probs, True),
        ("torch compiled", "torch", _in_torch, True),
    ]
    load = functools.partial
    return [LinearVariant(name, kind, load(load, loss), compiled=how) for name, kind, loss, how in ways]


class _Reference(check.Reference):
    def __init__(self, target: Tensor, weight: Tensor, ids: Tensor, probs: Tensor) -> None:
        super().__init__(target, weight, check.Options())
        self.ids, self.probs = ids, probs

    def rows(self, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        z = logits.detach().double().requires_grad_()
        log_q = z.log_softmax(-1).gather(-1, self.ids[part].clamp(min=0))
        value = _of_rows(log_q, self.probs[part].double())
        total = torch.where(self.counted[part], value, 0.0).sum() / self.number
        (grad,) = torch.autograd.grad(total, z)
        return total.detach(), grad


class FewClassesProblem(LinearProblem):
    """The named classes have 0.9 of the teacher's probability, in falling shares; the target is the first of them."""

    slack = 2.0  # the probability that is left over has the error of all logits

    def __init__(
        self, shape: HeadShape, dtype: torch.dtype, device: torch.device, *, ignored: float | None = None
    ) -> None:
        super().__init__(shape, dtype, device, ignored=ignored)
        shares = torch.rand(shape.rows, CLASSES, generator=self.generator, device=device).sort(descending=True).values
        self.probs = 0.9 * shares / shares.sum(-1, keepdim=True)
        # A step through all classes, so that no two of a row are equal.
        step = max(shape.classes // CLASSES, 1)
        self._steps = torch.arange(CLASSES, device=device) * step
        self.ids = self._ids_of(self.target)

    def _ids_of(self, target: Tensor) -> Tensor:
        ids = (target.clamp(min=0).unsqueeze(-1) + self._steps) % self.head.classes
        return torch.where(target.unsqueeze(-1) == check.IGNORE_INDEX, check.IGNORE_INDEX, ids)

    def use_targets(self, which: int) -> None:
        super().use_targets(which)
        self.ids.copy_(self._ids_of(self.target))

    def of_tokens(self) -> tuple[Tensor, ...]:
        return self.ids, self.probs

    def float64(self, options: check.Options) -> check.Reference:
        return _Reference(self.target, self.weight, self.ids, self.probs)
