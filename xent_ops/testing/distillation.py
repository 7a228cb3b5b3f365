"""The oracle and the error budgets of distillation losses, one for each row."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import activated, assert_within, eps


class DistillationExpected(NamedTuple):
    """float64 values of the rows' losses and of the gradient of the student's logits, with their error budgets."""

    loss: Tensor  # (...)
    grad: Tensor  # (..., V)
    loss_bound: Tensor
    grad_bound: Tensor
    loss_scale: Tensor  # (...): the sum of the absolute parts that cancel in the loss
    grad_scale: Tensor  # (..., V): the same sum for the gradient


def distillation_oracle(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None = None,
    *,
    grad_loss: Tensor | float = 1.0,
    beta: float = 0.0,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    num_classes: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    device: torch.device | str = "cpu",
) -> DistillationExpected:
    """Distillation losses of rows in float64 on ``device``, by F.kl_div as in TRL's generalized_jsd_loss, and autograd.

    All logits must be finite: autograd returns NaN for masked classes.

    Examples:
        >>> expected = distillation_oracle(torch.eye(2), torch.zeros(2, 2))
        >>> expected.loss
        tensor([0.1201, 0.1201], dtype=torch.float64)
    """
    dtype, classes = logits.dtype, logits.shape[-1] if num_classes is None else num_classes
    z = logits.detach().to(device, torch.float64).requires_grad_()
    x, tanh, steepest = activated(z[..., :classes], softcap, logit_scale)
    wide_teacher = teacher_logits.detach().to(device, torch.float64)[..., :classes]
    y, _, _ = activated(wide_teacher, teacher_softcap, teacher_logit_scale)
    log_s, log_t = (x / temperature).log_softmax(-1), (y / temperature).log_softmax(-1)

    def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    if beta == 0.0:
        log_m, loss = log_t, divergence(log_t, log_s)
    elif beta == 1.0:
        log_m, loss = log_t, divergence(log_s, log_t)
    else:
        log_m = torch.logsumexp(torch.stack([log_s + math.log(1 - beta), log_t + math.log(beta)]), 0)
        loss = beta * divergence(log_t, log_m) + (1 - beta) * divergence(log_s, log_m)
    counted, hard, hot = torch.ones_like(loss, dtype=torch.bool), torch.zeros_like(loss), torch.zeros_like(x)
    log_p = x.log_softmax(-1)
    if target is not None:
        index = target.detach().to(device, torch.int64)
        counted = index != ignore_index
        if hard_weight != 0.0:
            index = torch.where(counted, index, 0)
            hard = -hard_weight * log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            hot = F.one_hot(index, classes).double()
    loss = torch.where(counted, loss + hard, 0.0)
    a = torch.as_tensor(grad_loss).detach().to(device, torch.float64).expand(loss.shape)
    (grad,) = torch.autograd.grad(loss, z, a)
    with torch.no_grad():
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        s, t, p = log_s.exp(), log_t.exp(), log_p.exp()
        far = 8 + torch.stack([x / temperature, y / temperature, x]).logsumexp(-1).abs().sum(0)
        sizes = ((s + t) * (log_s.abs() + log_t.abs())).sum(-1) + hard.abs() + abs(hard_weight) + loss.abs()
        loss_bound = torch.where(counted, 16 * eps(accumulate) * (far + sizes), 0.0)
        ratio = log_s - log_m
        parts = s * (1 + ratio.abs() + (s * ratio).sum(-1, keepdim=True).abs()) + t
        parts = parts * (1 / temperature) + abs(hard_weight) * (p + hot)
        parts = parts * steepest * a.abs().unsqueeze(-1) * (1 + tanh.square())
        info = torch.finfo(dtype)
        bound = 8 * eps(accumulate) * far.unsqueeze(-1) * parts
        bound = bound + torch.finfo(accumulate).tiny * 4 * parts.amax(-1, keepdim=True).clamp(min=1.0)
        bound = F.pad(bound, (0, logits.shape[-1] - classes))
        bound = torch.where(counted.unsqueeze(-1), bound + info.eps * grad.abs() + info.tiny * info.eps, 0.0)
        parts = F.pad(torch.where(counted.unsqueeze(-1), parts, 0.0), (0, logits.shape[-1] - classes))
        scale = torch.where(counted, far + sizes, 0.0)
    return DistillationExpected(loss.detach(), grad, loss_bound, bound, scale, parts)


def assert_distillation(loss: Tensor, grad: Tensor, expected: DistillationExpected) -> None:
    """Check losses of rows and the gradient of the student's logits.

    Examples:
        >>> logits, teacher = torch.randn(4, 9, requires_grad=True), torch.randn(4, 9)
        >>> loss = xent_ops.distillation_loss(logits, teacher, reduction="none")
        >>> (grad,) = torch.autograd.grad(loss.sum(), logits)
        >>> assert_distillation(loss, grad, distillation_oracle(logits, teacher))
    """
    assert_within("loss", loss, expected.loss, expected.loss_bound)
    assert_within("grad", grad, expected.grad, expected.grad_bound)
