"""The oracle and the error budgets of linear cross entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import activated, assert_within, eps, oracle


class LinearExpected(NamedTuple):
    """float64 values of a linear cross entropy and its gradients, and how far each element may be from them."""

    value: Tensor  # () or, for "none", (...)
    lse: Tensor  # (...)
    grads: tuple[Tensor, Tensor, Tensor]  # of input, linear_weight, linear_bias (also without a bias)
    value_bound: Tensor
    lse_bound: Tensor
    grad_bounds: tuple[Tensor, Tensor, Tensor]


def linear_oracle(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    upstream: Tensor | float = 1.0,
    reduction: str = "mean",
    divisor: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None,
    **options: Any,
) -> LinearExpected:
    """Linear cross entropy with all its logits in float64, by ``oracle``, and error budgets from formats and chunks.

    Logits are rounded once to ``logits_dtype`` (None: the input's), and their gradient to the input's dtype. Products
    are added up in float32 (float64). The gradient of linear_weight is rounded to ``accumulate_dtype`` (None: the
    input's; float32 for float16) after each chunk of ``chunk_rows`` rows (None: all). Every gradient is rounded to the
    input's dtype before and after its multiplication by the upstream gradient. float16 gradients of logits assume
    upstream gradients of at most about one.

    Examples:
        >>> head, target = torch.zeros(4, 8), torch.arange(2)
        >>> expected = linear_oracle(torch.randn(2, 8), head, target)
        >>> expected.value
        tensor(1.3863, dtype=torch.float64)
    """
    dtype, shape = input.dtype, target.shape
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    half, tiny = eps(dtype) / 2, torch.finfo(dtype).tiny * eps(dtype)
    sums_dtype = accumulate_dtype or (torch.float32 if dtype == torch.float16 else dtype)

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().double().cpu()

    def sum_error(terms: int) -> float:
        """The error of a product that adds up ``terms`` terms, relative to the sum of their magnitudes."""
        return eps(accumulator) * (4 + 2 * math.sqrt(terms))

    t = target.detach().long().cpu().reshape(-1)
    x, head = wide(input).reshape(len(t), input.shape[-1]), wide(linear_weight)
    bias = wide(linear_bias) if linear_bias is not None else head.new_zeros(head.shape[0])
    logits = x @ head.t() + bias
    magnitude = x.abs() @ head.abs().t() + bias.abs()
    counted = t != ignore_index
    forward = oracle(logits, t, weight, ignore_index=ignore_index, **options)

    # The divisors of a mean, and the upstream gradients of each row's loss and lse.
    number = counted.sum().double()
    divide = (torch.tensor(float(divisor)).double(), torch.tensor(float(divisor)).double())
    if reduction == "mean":
        wt = counted.double() if weight is None else torch.where(counted, wide(weight)[torch.where(counted, t, 0)], 0)
        divide = (wt.sum(), number)
    up = torch.as_tensor(upstream).detach().double().cpu().reshape(-1)
    square = torch.where(counted, lse_square_scale * forward.lse.square(), 0)
    if reduction == "none":
        value = (forward.loss + square).reshape(shape)
    else:
        value = forward.loss.sum() / divide[0] + (square.sum() / divide[1] if lse_square_scale else 0)
    a = torch.where(counted, up / divide[0], 0)
    per_square = torch.where(counted, 2 * lse_square_scale * up / divide[1], 0)
    b = torch.where(per_square == 0, 0, per_square * forward.lse)
    rows = oracle(logits, t, weight, grad_loss=a, grad_lse=b, ignore_index=ignore_index, **options)

    # The errors of x, lse, softmax and gradient from rounded logits.
    x_of_logits, tanh, scale = activated(logits, **options)
    error = eps(logits_dtype or dtype) / 2 * logits.abs() + sum_error(x.shape[1]) * magnitude + tiny
    error_x = torch.nan_to_num(error * scale, posinf=0.0)
    slope, bend = torch.full_like(logits, scale), torch.zeros_like(logits)
    if (cap := options.get("softcap")) is not None:
        slope, bend = scale * (1 - tanh.square()), 2 * scale / cap * tanh.abs()
        slope = torch.minimum(slope + bend * error_x, torch.tensor(scale).double())
    p = (x_of_logits - forward.lse.unsqueeze(-1)).exp()
    error_lse = (p * error_x.exp()).sum(-1).log().clamp(min=0)
    error_p = p * torch.expm1(error_x + error_lse.unsqueeze(-1))
    hot = F.one_hot(torch.where(counted, t, 0), head.shape[0])
    smooth = options.get("label_smoothing", 0.0)
    wide_weight = torch.ones_like(bias) if weight is None else wide(weight)
    wt = torch.where(counted, wide_weight[torch.where(counted, t, 0)], 0)
    mass = wt.unsqueeze(-1) * (1 - smooth) * hot + (smooth / head.shape[0] * wide_weight if smooth else 0)
    mass = torch.where(counted.unsqueeze(-1), mass, 0)  # target probabilities: loss = sum_j mass_j (lse - x_j)
    total = (a * mass.sum(-1) + b).abs()
    mass = mass.abs()
    parts = total.unsqueeze(-1) * p + a.abs().unsqueeze(-1) * mass
    error_g = total.unsqueeze(-1) * error_p * slope + parts * bend * error_x
    error_g = error_g + (per_square.abs() * error_lse).unsqueeze(-1) * p * slope
    far = 8 + torch.nan_to_num(forward.lse, 0, 0, 0).abs().unsqueeze(-1)
    error_g = error_g + 8 * eps(accumulator) * far * rows.grad_scale + half * (rows.grad.abs() + error_g)
    unit = up.abs().max().clamp(min=1.0) if up.numel() else up.new_ones(())  # size of unscaled gradients
    if dtype == torch.float16:
        unit = torch.nan_to_num(total.max(), posinf=1.0) if total.numel() else unit
    passes = (total > 0).unsqueeze(-1)
    error_g = torch.where(passes, error_g + tiny * unit, 0)

    error_loss = (mass * error_x).sum(-1) + mass.sum(-1) * error_lse + 16 * eps(accumulator) * forward.loss_scale
    error_square = 2 * lse_square_scale * (forward.lse.abs() + error_lse) * error_lse
    error_square = torch.where(counted, error_square.abs() + 16 * eps(accumulator) * square.abs(), 0)
    lse_bound = error_lse + 8 * eps(accumulator) * (1 + torch.nan_to_num(forward.lse, 0, 0, 0).abs())
    if reduction == "none":
        value_bound = (error_loss + error_square).reshape(shape)
    else:
        value_bound = error_loss.sum() / divide[0].abs() + error_square.sum() / (divide[1].abs() if divide[1] else 1)
        value_bound = value_bound + sum_error(t.numel()) * (forward.loss.abs().sum() / divide[0].abs() + value.abs())

    g = rows.grad
    grad_input, grad_weight, grad_bias = g @ head, torch.zeros_like(head), g.sum(0)
    rounded, steps = torch.zeros_like(head), chunk_rows or max(len(t), 1)
    for start in range(0, len(t), steps):
        grad_weight = grad_weight + g[start : start + steps].t() @ x[start : start + steps]
        rounded += eps(sums_dtype) / 2 * grad_weight.abs() + torch.finfo(sums_dtype).tiny * eps(sums_dtype) * unit

    def budget(products: Tensor, magnitudes: Tensor, terms: int, final: Tensor, roundings: int) -> Tensor:
        bound = products + sum_error(terms) * magnitudes
        return 1.05 * (bound + roundings * (half * (final.abs() + bound) + tiny * (1 + unit)))

    bounds = (
        budget(error_g @ head.abs(), g.abs() @ head.abs(), head.shape[0], grad_input, 2),
        budget(error_g.t() @ x.abs(), g.abs().t() @ x.abs(), len(t), grad_weight, 1) + 1.05 * rounded,
        budget(error_g.sum(0), g.abs().sum(0), len(t), grad_bias, 1),
    )
    grad_input, input_bound = grad_input.reshape(input.shape), bounds[0].reshape(input.shape)
    return LinearExpected(
        value,
        forward.lse.reshape(shape),
        (grad_input, grad_weight, grad_bias),
        value_bound,
        lse_bound.reshape(shape),
        (input_bound, *bounds[1:]),
    )


def assert_linear(value: Tensor, grads: Sequence[Tensor | None], expected: LinearExpected) -> None:
    """Check a loss and its gradients of input, linear_weight and linear_bias. None skips a gradient.

    Examples:
        >>> x, head = torch.randn(6, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
        >>> loss = xent_ops.linear_cross_entropy(x, head, torch.arange(6))
        >>> grads = torch.autograd.grad(loss, (x, head))
        >>> assert_linear(loss, grads, linear_oracle(x, head, torch.arange(6)))
    """
    assert_within("value", value, expected.value, expected.value_bound)
    for name, actual, expected_grad, bound in zip(
        ("grad_input", "grad_linear_weight", "grad_linear_bias"),
        (*grads, None)[:3],
        expected.grads,
        expected.grad_bounds,
        strict=True,
    ):
        if actual is not None:
            assert_within(name, actual, expected_grad, bound)
