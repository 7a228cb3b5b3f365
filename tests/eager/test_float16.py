"""Heads of 16 bits with factors of rows far from one: gradients are those of float64 wherever float16 can hold them."""

import pytest
import torch
from helpers.covering import covering

import xent_ops

N, V, H = 64, 500, 32


def negative(stats, factors):
    return -factors * stats.log_probs


def kl_and_jsd(stats, factors):
    return factors * (stats.kl + stats.jsd)


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
    return xent_ops.linear_top_k_distillation_loss(h, w, ids, probs, token_weight=factors, **options)


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
    "divergences": lambda h, w, t, f, other: xent_ops.linear_distillation_token_loss(
        h, w, other, w.detach() * 0.5, kl_and_jsd, rows=(f,), target=t
    ),
    "top k": lambda h, w, t, f, other: of_few(h, w, t, f),
    "tail": lambda h, w, t, f, other: of_few(h, w, t, f, tail=True),
}
FACTORS = {"1": 1.0, "1e5": 1e5, "1e-7": 1e-7, "one of 1e5": 1.0}


# Of a gradient's norm: what rounding of its logits and of their gradients makes of it.
NEAR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("loss, factor, compiled, dtype", covering(LOSSES, FACTORS, [False, True], NEAR), ids=str)
def test_factors_of_rows(device, loss, factor, compiled, dtype):
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
    h, w, _, other = problem(device, dtype)
    value = step(h, w, other)
    for grad, exact in zip(torch.autograd.grad(value, (h, w), torch.full_like(value, scale)), wanted, strict=True):
        assert (grad.double() - exact * scale).norm() < NEAR[dtype] * (exact * scale).norm()


# Rows that weigh a ten-thousandth of others: 1 / length of a token, 1 / frequency of a class.
FEW, MANY, SCALE = 48, 16000, 65536.0
LITTLE = torch.logspace(-4, 0, FEW)[torch.randperm(FEW, generator=torch.Generator().manual_seed(1))]


def common_problem(device, dtype):
    """The rows of the head have a common part, so that the softmax of all other classes is in the gradient."""
    generator = torch.Generator().manual_seed(0)
    h, other = (torch.randn(FEW, H, generator=generator) for _ in range(2))
    w = torch.randn(MANY, H, generator=generator) / 8 + torch.randn(H, generator=generator) / 4
    target = torch.randint(MANY, (FEW,), generator=generator)
    h, w, other = (tensor.half().to(device, dtype) for tensor in (h, w, other))
    return h.requires_grad_(), w.requires_grad_(), target.to(device), other


def class_weight(target):
    return torch.ones(MANY, device=target.device).index_copy(0, target, LITTLE.to(target.device))


def by_class(h, w, t, f, **options):
    return xent_ops.linear_cross_entropy(h, w, t, weight=class_weight(t), **options)


WEIGHTED = {
    "mean": lambda h, w, t, f, other: linear(h, w, t, f),
    "sum, chunks": lambda h, w, t, f, other: linear(h, w, t, f, reduction="sum", divisor=FEW, chunk_rows=16),
    "skip_ignored": lambda h, w, t, f, other: linear(
        h, w, torch.cat([t, t.new_full((9,), -100)])[:FEW], f, skip_ignored=True, chunk_rows=16
    ),
    "z-loss": lambda h, w, t, f, other: linear(h, w, t, f, lse_square_scale=1e-2),
    "batch_invariant": lambda h, w, t, f, other: linear(h, w, t, f, reduction="sum", divisor=FEW, batch_invariant=True),
    "float32 logits": lambda h, w, t, f, other: linear(
        h, w, t, f, logits_dtype=torch.float32 if h.dtype == torch.float16 else None
    ),
    "class weights": lambda h, w, t, f, other: by_class(h, w, t, f),
    "class weights, sum, smoothing": lambda h, w, t, f, other: by_class(
        h, w, t, f, reduction="sum", divisor=FEW, label_smoothing=1e-3, chunk_rows=16
    ),
    "both": lambda h, w, t, f, other: by_class(h, w, t, f, token_weight=f.sqrt()),
    "outputs": lambda h, w, t, f, other: xent_ops.linear_cross_entropy_outputs(h, w, t, token_weight=f).loss,
    "distillation": lambda h, w, t, f, other: xent_ops.linear_distillation_loss(
        h, w, other, w.detach() * 0.5, target=t, token_weight=f
    ),
    "top k, one class": lambda h, w, t, f, other: xent_ops.linear_top_k_distillation_loss(
        h, w, t.unsqueeze(-1), f.unsqueeze(-1)
    ),
    "top k": lambda h, w, t, f, other: xent_ops.linear_top_k_distillation_loss(
        h, w, torch.stack([t, (t + 1) % MANY], -1), torch.stack([f, f], -1).softmax(-1), token_weight=f
    ),
}


def assert_rows(got, wanted, limit=1e-2):
    off = (got.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert (off < limit).all(), off


@pytest.mark.parametrize("loss, compiled", [(loss, False) for loss in WEIGHTED] + [("mean", True), ("both", True)])
def test_rows_that_weigh_little(device, loss, compiled):
    """Each row of the input's gradient by itself, under the first scale of torch.amp.GradScaler."""
    factors = LITTLE.to(device)
    h, w, target, other = common_problem(device, torch.float64)
    wanted = torch.autograd.grad(WEIGHTED[loss](h, w, target, factors, other), (h, w))
    step = WEIGHTED[loss]
    if compiled:
        step = torch.compile(lambda *args: WEIGHTED[loss](*args), backend="aot_eager", fullgraph=True)
    h, w, target, other = common_problem(device, torch.float16)
    grads = torch.autograd.grad(step(h, w, target, factors, other), (h, w), torch.tensor(SCALE, device=device))
    assert_rows(grads[0], wanted[0] * SCALE)
    assert (grads[1] - wanted[1] * SCALE).norm() < 1e-2 * (wanted[1] * SCALE).norm()


def test_two_backwards_of_rows_that_weigh_little(device):
    """The first multiplies the kept gradients, in place or not; the second makes them again."""
    h, w, target, _ = common_problem(device, torch.float16)
    loss = linear(h, w, target, LITTLE.to(device), reduction="sum", divisor=FEW) * SCALE
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    second = torch.autograd.grad(loss, (h, w))
    assert_rows(first[0], second[0].double())
    assert (first[1] - second[1]).double().norm() < 2e-3 * second[1].double().norm()


@pytest.mark.parametrize("kind", ["token_weight", "weight"])
def test_a_tiny_weight_leaves_all_gradients_finite(device, kind):
    """Its reciprocal would be infinite."""
    h, w, target, _ = problem(device, torch.float16)
    weights = torch.full((len(target) if kind == "token_weight" else len(w),), 1.0, device=device)
    weights[: len(weights) // 2] = torch.tensor([1e-30, 1e-38, 1e-45])[torch.arange(len(weights) // 2) % 3].to(device)
    loss = xent_ops.linear_cross_entropy(h, w, target, **{kind: weights})
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (h, w)))
