"""The oracle and the error budgets of losses of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Expected(NamedTuple):
    """float64 values of a row loss, its lse, and the gradient of the logits for the upstream gradients."""

    loss: Tensor  # (...)
    lse: Tensor  # (...)
    grad: Tensor  # (..., V)
    grad_scale: Tensor  # (..., V): the sum of the absolute parts that cancel in grad
    loss_scale: Tensor  # (...): the same sum for the loss


class Activated(NamedTuple):
    """Logits after the options."""

    x: Tensor
    tanh: Tensor  # the tanh of the softcap; 0 without a softcap
    steepest: float  # |dx / dlogit| at most


def activated(
    logits: Tensor, softcap: float | None = None, logit_scale: float = 1.0, **_other_options: Any
) -> Activated:
    x = logits * logit_scale
    if softcap is None:
        return Activated(x, torch.zeros_like(x), abs(logit_scale))
    tanh = torch.tanh(x / softcap)
    return Activated(softcap * tanh, tanh, abs(logit_scale))


def oracle(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    grad_loss: Tensor | float = 1.0,
    grad_lse: Tensor | float = 0.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    device: torch.device | str = "cpu",
) -> Expected:
    """Row losses (..., ) of logits (..., V) and their gradients, in float64 on ``device``, by torch's operators.

    Examples:
        >>> expected = oracle(torch.zeros(2, 4), torch.tensor([0, -100]))
        >>> expected.loss
        tensor([1.3863, 0.0000], dtype=torch.float64)
    """
    classes = logits.shape[-1]
    z = logits.detach().to(device, torch.float64).requires_grad_()
    x, _, steepest = activated(z, softcap, logit_scale)
    w = None if weight is None else weight.detach().to(device, torch.float64)
    t = target.detach().to(device, torch.int64)
    loss = F.cross_entropy(
        x.reshape(-1, classes), t.reshape(-1), w, None, ignore_index, None, "none", label_smoothing
    ).reshape(t.shape)
    lse = torch.logsumexp(x, -1)

    def upstream(value: Tensor | float) -> Tensor:
        return torch.as_tensor(value).detach().to(device, torch.float64).expand(t.shape)

    a, b = upstream(grad_loss), upstream(grad_lse)
    (grad,) = torch.autograd.grad((loss, lse), z, (a, b))

    with torch.no_grad():
        derivative = torch.full_like(z, steepest)
        if softcap is not None:
            derivative = derivative * (1 + (x / softcap).square())  # the sum of its two parts, not their difference
        counted = t != ignore_index
        # An ignored row gets no gradient, whatever its logits are.
        passes_back = (counted | (b != 0.0)).unsqueeze(-1)
        grad = torch.where(passes_back, grad, 0.0)
        wt = torch.ones_like(a) if w is None else w[torch.where(counted, t, 0)]
        wt = torch.where(counted, wt, 0)
        part_b = torch.where(counted, a.abs() * wt, 0)
        smoothing = z.new_zeros(classes)  # not 0 times a weight, which may be infinite
        if label_smoothing > 0.0:
            smoothing = label_smoothing / classes * (smoothing + 1 if w is None else w)
        part_c = torch.where(counted, a.abs(), 0).unsqueeze(-1) * smoothing
        p = (x - lse.unsqueeze(-1)).exp()
        hot = F.one_hot(torch.where(counted, t, 0), classes)
        total = part_b + part_c.sum(-1) + b.abs()
        grad_scale = derivative * (total.unsqueeze(-1) * p + part_b.unsqueeze(-1) * hot + part_c)
        grad_scale = torch.where(passes_back, grad_scale, 0.0)
        finite = torch.where(x.isfinite(), x, 0)
        loss_scale = torch.where(counted, wt + loss.abs() + (finite.abs() * smoothing).sum(-1), 0.0)
    return Expected(loss.detach(), lse.detach(), grad, grad_scale, loss_scale)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def assert_within(name: str, actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    actual = actual.detach().double().cpu()
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = (actual - expected).abs()
    bad = ~(same | ((error <= bound) & error.isfinite()))  # the bound may be infinite too
    if bool(bad.any()):
        worst = int(torch.where(bad, torch.nan_to_num(error / bound, nan=float("inf")), 0).argmax())
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} elements are out of budget; worst at flat index {worst}: "
            f"{actual.flatten()[worst]} instead of {expected.flatten()[worst]}, "
            f"budget {bound.flatten()[worst]:.3g}"
        )


def assert_loss(actual: Tensor, expected: Expected) -> None:
    """Check row losses: float32 (float64) sums over V classes in a tree, relative to the parts that cancel.

    Examples:
        >>> x, target = realistic_logits(4, 9, dtype=torch.float32), torch.arange(4)
        >>> assert_loss(xent_ops.cross_entropy(x, target, reduction="none"), oracle(x, target))
    """
    bound = 16 * eps(actual.dtype) * expected.loss_scale
    assert_within("loss", actual, expected.loss, bound)


def assert_lse(actual: Tensor, expected: Expected) -> None:
    """Check lse: 8 roundings. (For 16-bit logits and a softcap up to 64, GPU kernels may be off by 6e-7 of the cap.)

    Examples:
        >>> x, target = realistic_logits(4, 9, dtype=torch.float32), torch.arange(4)
        >>> assert_lse(xent_ops.cross_entropy_outputs(x, target).lse, oracle(x, target))
    """
    bound = 8 * eps(actual.dtype) * (1 + torch.nan_to_num(expected.lse, 0, 0, 0).abs())
    assert_within("lse", actual, expected.lse, bound)


def assert_grad(actual: Tensor, expected: Expected) -> None:
    """Check gradients, element by element: one rounding to their dtype, and a softmax from a rounded lse.

    lse is stored in float32, so exp(x - lse) has a relative error of eps * |lse|. Under the smallest normal number of
    the gradient's dtype, the budget is the absolute step of the format.

    Examples:
        >>> x, target = realistic_logits(4, 9, dtype=torch.bfloat16).requires_grad_(), torch.arange(4)
        >>> xent_ops.cross_entropy(x, target, reduction="sum").backward()
        >>> assert_grad(x.grad, oracle(x, target))
    """
    accumulate = torch.float64 if actual.dtype == torch.float64 else torch.float32
    info = torch.finfo(actual.dtype)
    magnitude = 8 + torch.nan_to_num(expected.lse, 0, 0, 0).abs().unsqueeze(-1)
    bound = (
        info.eps * expected.grad.abs() + 8 * eps(accumulate) * magnitude * expected.grad_scale + info.tiny * info.eps
    )
    # Exponentials below 2^-126 are flushed to zero on GPUs.
    bound = bound + torch.finfo(accumulate).tiny * 4 * expected.grad_scale.amax(-1, keepdim=True).clamp(min=1.0)
    assert_within("grad", actual, expected.grad, bound)


def realistic_logits(
    *shape: int, dtype: torch.dtype, std: float = 3.0, seed: int = 0, outliers: bool = False, padding: int = 0
) -> Tensor:
    """Logits like those of models: normal with ``std``; outliers of +-1e4; the last ``padding`` columns are -inf.

    Examples:
        >>> realistic_logits(2, 9, dtype=torch.bfloat16, padding=1)[:, -1].tolist()
        [-inf, -inf]
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator) * std
    if outliers:
        flat = logits.view(-1)
        positions = torch.randint(0, flat.numel(), (max(1, flat.numel() // 1000),), generator=generator)
        flat[positions] = 1e4 * torch.randn(positions.numel(), generator=generator).sign()
    if padding:
        logits[..., -padding:] = float("-inf")
    return logits.to(dtype)
