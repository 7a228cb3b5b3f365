"""Results do not depend on torch.set_default_dtype."""

import pytest
import torch

import xent_ops

V, H, N = 60, 32, 16


def made(dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def target():
    return torch.arange(N) * 7 % V


def fn(stats):
    return -stats.log_probs * stats.lse - 0.1 * stats.entropy


def ids():
    return torch.stack([target(), (target() + 1) % V], -1)


def of_ids(x, w, **options):
    probs = torch.full((N, 2), 0.4, dtype=x.dtype)
    return xent_ops.linear_top_k_distillation_loss(x, w, ids(), probs, **options)


CALLS = {
    "cross_entropy": lambda x, w: xent_ops.cross_entropy(x @ w.t(), target(), label_smoothing=0.1, softcap=20.0),
    "grad_in_forward": lambda x, w: xent_ops.cross_entropy(x @ w.t(), target(), grad_in_forward=True),
    "cross_entropy_outputs": lambda x, w: xent_ops.cross_entropy_outputs(x @ w.t(), target()).loss,
    "token_log_probs": lambda x, w: xent_ops.token_log_probs(x @ w.t(), ids()).log_probs.sum(),
    "token_loss": lambda x, w: xent_ops.token_loss(x @ w.t(), target(), fn),
    "distillation_loss": lambda x, w: xent_ops.distillation_loss(x @ w.t(), -(x @ w.t()).detach(), beta=0.5),
    "linear": lambda x, w: xent_ops.linear_cross_entropy(x, w, target(), lse_square_scale=0.1, chunk_rows=5),
    "linear, sum": lambda x, w: xent_ops.linear_cross_entropy(x, w, target(), reduction="sum", divisor=3.0),
    "linear, none": lambda x, w: xent_ops.linear_cross_entropy(x, w, target(), reduction="none").sum(),
    "linear, skip": lambda x, w: xent_ops.linear_cross_entropy(x, w, target(), skip_ignored=True),
    "fp8": lambda x, w: xent_ops.linear_cross_entropy(x, w, target(), products="fp8"),
    "fp8_gradients": lambda x, w: xent_ops.linear_cross_entropy(x, w, target(), products="fp8_gradients"),
    "batch_invariant": lambda x, w: xent_ops.linear_cross_entropy(x, w, target(), batch_invariant=True),
    "top k": of_ids,
    "tail": lambda x, w: of_ids(x, w, tail=True),
    "tail of logits": lambda x, w: xent_ops.top_k_distillation_loss(
        x @ w.t(), ids(), torch.full((N, 2), 0.4, dtype=x.dtype), tail=True
    ),
    "linear_token_log_probs": lambda x, w: xent_ops.linear_token_log_probs(x, w, target()).log_probs.sum(),
    "linear_token_loss": lambda x, w: xent_ops.linear_token_loss(x, w, target(), fn, chunk_rows=5),
    "linear_distillation": lambda x, w: xent_ops.linear_distillation_loss(x, w, -x.detach(), w.detach(), beta=0.5),
}


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default(request):
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CALLS)
def test_no_default_dtype(device, default, name):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if "fp8" in name and dtype == torch.float32:
            continue
        results = []
        for chosen in (torch.float32, default):
            torch.set_default_dtype(chosen)
            x, w = (made(dtype, *shape).to(device).requires_grad_() for shape in ((N, H), (V, H)))
            with torch.device(device):
                loss = CALLS[name](x, w)
            results.append((loss.detach(), *torch.autograd.grad(loss, (x, w))))
        torch.testing.assert_close(*results, rtol=0.0, atol=0.0)
