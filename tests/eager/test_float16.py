"""float16 with factors of rows far from one: gradients are those of float64 wherever float16 can hold them."""

import pytest
import torch
from helpers.covering import covering

import xent_ops

N, V, H = 64, 500, 32


def negative(stats, factors):
    return -factors * stats.log_probs


def problem(device, dtype):
    """(hidden states, head, targets, a teacher's hidden states), the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(0)
    h, w, other = (torch.randn(size, H, generator=generator).mul(0.5).half().to(device, dtype) for size in (N, V, N))
    target = torch.randint(V, (N,), generator=generator)
    target[::5] = -100
    return h.requires_grad_(), w.requires_grad_(), target.to(device), other


def of_few(h, w, t, factors, **options):
    ids = torch.stack([t, torch.where(t == -100, -100, (t + 1) % V)], -1)
    probs = torch.tensor([0.6, 0.3], device=h.device).expand(N, 2)
    return xent_ops.linear_cross_entropy(h, w, ids, target_probs=probs, token_weight=factors, **options)


def linear(h, w, t, factors, **options):
    return xent_ops.linear_cross_entropy(h, w, t, token_weight=factors, **options)


LOSSES = {
    "mean": lambda h, w, t, f, other: linear(h, w, t, f),
    "skip_ignored": lambda h, w, t, f, other: linear(h, w, t, f, skip_ignored=True, chunk_rows=16),
    "sum": lambda h, w, t, f, other: linear(h, w, t, f, reduction="sum", divisor=1e3),
    "rows": lambda h, w, t, f, other: linear(h, w, t, f, reduction="none").sum(),
    "z-loss": lambda h, w, t, f, other: linear(h, w, t, f, lse_square_scale=1e-2, label_smoothing=0.1),
    "class weights": lambda h, w, t, f, other: linear(
        h, w, t, f, reduction="sum", weight=torch.linspace(1e-7, 1e-6, V, device=h.device)
    ),
    "outputs": lambda h, w, t, f, other: xent_ops.linear_cross_entropy_outputs(h, w, t, token_weight=f).loss,
    "linear_token_loss": lambda h, w, t, f, other: xent_ops.linear_token_loss(
        h, w, t, negative, rows=(f,), reduction="sum", divisor=N
    ),
    "distillation": lambda h, w, t, f, other: xent_ops.linear_distillation_loss(
        h, w, other, w.detach() * 0.5, target=t, token_weight=f, reduction="sum", divisor=N
    ),
    "target_probs": lambda h, w, t, f, other: of_few(h, w, t, f),
    "tail": lambda h, w, t, f, other: of_few(h, w, t, f, tail=True),
}
FACTORS = {"1": 1.0, "1e5": 1e5, "1e-7": 1e-7, "one of 1e5": 1.0}


@pytest.mark.parametrize("loss, factor, compiled", covering(LOSSES, FACTORS, [False, True]), ids=str)
def test_factors_of_rows(device, loss, factor, compiled):
    """With an upstream gradient, as a loss scaler has it, for which the largest gradient is one."""
    factors = torch.full((N,), FACTORS[factor], device=device)
    if "one" in factor:
        factors[3] = 1e5
    h, w, target, other = problem(device, torch.float64)
    wanted = torch.autograd.grad(LOSSES[loss](h, w, target, factors, other), (h, w))
    scale = 1.0 / max(grad.abs().max().item() for grad in wanted)

    def step(h, w, other):
        return LOSSES[loss](h, w, target, factors, other)

    if compiled:
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    h, w, _, other = problem(device, torch.float16)
    value = step(h, w, other)
    for grad, exact in zip(torch.autograd.grad(value, (h, w), torch.full_like(value, scale)), wanted, strict=True):
        assert (grad.double() - exact * scale).norm() < 2e-3 * (exact * scale).norm()
