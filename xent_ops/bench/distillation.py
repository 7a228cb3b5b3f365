"""``--linear HIDDEN --distillation TEACHER_HIDDEN``: a teacher's distribution, beside the four products."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops

from . import check
from .cases import Peer, imported, of_peers
from .linear_cases import TEACHER_UNIT, LinearVariant
from .linear_problem import LinearProblem
from .sizes import HeadShape

# A loss is a function of (hidden, matrix, target, teacher's hidden, teacher's matrix).


def _ours(hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Tensor, **options: Any) -> Tensor:
    return xent_ops.linear_distillation_loss(hidden, matrix, *teacher, target=target, **options)


def _of_logits(hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Tensor, beta: float) -> Tensor:
    return xent_ops.distillation_loss(F.linear(hidden, matrix), F.linear(*teacher), target=target, beta=beta)


def _divergences(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """Of rows, as TRL's generalized_jsd_loss."""
    log_s, log_t = logits.log_softmax(-1), teacher_logits.log_softmax(-1)

    def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    if beta == 0.0:
        return divergence(log_t, log_s)
    if beta == 1.0:
        return divergence(log_s, log_t)
    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
    return beta * divergence(log_t, log_m) + (1 - beta) * divergence(log_s, log_m)


def _mean(rows: Tensor, target: Tensor) -> Tensor:
    counted = target != check.IGNORE_INDEX
    return torch.where(counted, rows, 0.0).sum() / counted.sum()


def _in_torch(hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Tensor, beta: float) -> Tensor:
    rows = _divergences(F.linear(hidden, matrix).float(), F.linear(*teacher).float(), beta)
    return _mean(rows, target)


def _liger(beta: float) -> Any:
    loss = imported("liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss")(0.0, 1.0, beta)
    return lambda hidden, matrix, target, *teacher: loss(hidden, matrix, *teacher, target, None, None)


def variants(beta: float) -> tuple[list[LinearVariant], list[str]]:
    def made(name: str, kind: str, loss: Any, **how: Any) -> LinearVariant:
        load = functools.partial(functools.partial, loss, beta=beta)
        return LinearVariant(name, kind, load, against=TEACHER_UNIT, **how)

    peers, missing = of_peers(LinearVariant, peers_of(beta))
    return [
        made("xent eager", "ours", _ours),
        made("xent compiled", "ours", _ours, compiled=True),
        made("xent skipping", "ours", functools.partial(_ours, skip_ignored=True)),
        made("unfused xent compiled", "ours", _of_logits, compiled=True),
        made("unfused torch compiled", "torch", _in_torch, compiled=True),
        *(replace(peer, against=TEACHER_UNIT) for peer in peers),
    ], missing


def peers_of(beta: float) -> tuple[Peer, ...]:
    """Liger's loss is a Function in eager, which compiles its chunks."""
    return (Peer(("liger-kernel", "liger-kernel-nightly"), "liger_kernel", functools.partial(_liger, beta)),)


class _Reference(check.Reference):
    def __init__(self, target: Tensor, weight: Tensor, beta: float, teacher: Tensor, matrix: Tensor) -> None:
        super().__init__(target, weight, check.Options())
        self.beta, self.teacher, self.matrix = beta, teacher, matrix.double().T

    def rows(self, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        z = logits.detach().double().requires_grad_()
        value = _divergences(z, self.teacher[part].double() @ self.matrix, self.beta)
        total = torch.where(self.counted[part], value, 0.0).sum() / self.number
        (grad,) = torch.autograd.grad(total, z)
        return total.detach(), grad


class DistillationProblem(LinearProblem):
    """Student and teacher know nothing of each other. The loss is about one, where cross entropy is eight."""

    slack, loss_slack = 2.0, 8.0

    def __init__(
        self,
        of_teacher: tuple[int, float],  # its hidden size, and beta
        shape: HeadShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        ignored: float | None = None,
    ) -> None:
        super().__init__(shape, dtype, device, ignored=ignored)
        new = functools.partial(torch.randn, generator=self.generator, device=device)
        teacher_hidden, self.beta = of_teacher
        self.teacher = new(shape.rows, teacher_hidden).to(dtype)
        self.teacher_matrix = (new(shape.classes, teacher_hidden) / teacher_hidden**0.5).to(dtype)

    def of_tokens(self) -> tuple[Tensor, ...]:
        return self.teacher, self.teacher_matrix

    def float64(self, options: check.Options) -> check.Reference:
        return _Reference(self.target, self.weight, self.beta, self.teacher, self.teacher_matrix)
