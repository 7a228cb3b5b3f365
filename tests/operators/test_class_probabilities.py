"""Class probabilities as targets, against F.cross_entropy in float64."""

import pytest
import torch
import torch.nn.functional as F
from against_oracle import OPTIONS
from helpers.covering import covering

import xent_ops
from xent_ops.kernels import reference_soft
from xent_ops.testing import realistic_logits

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(
    "dtype, name, weighted", covering([torch.float32, torch.bfloat16, torch.float64], OPTIONS, [False, True]), ids=str
)
def test_class_probabilities(device, dtype, weighted, name):
    options = OPTIONS[name]
    logits = realistic_logits(5, 1003, dtype=dtype)
    target = torch.softmax(realistic_logits(5, 1003, dtype=torch.float64, seed=5), -1).to(dtype)
    weight = (
        torch.rand(1003, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
        if weighted
        else None
    )
    x, q = logits.to(device).requires_grad_(), target.to(device).requires_grad_()
    w = None if weight is None else weight.to(device).requires_grad_()
    ours = xent_ops.cross_entropy(x, q, w, reduction="none", **options)
    x64, q64 = logits.double().requires_grad_(), target.double().requires_grad_()
    w64 = None if weight is None else weight.double().requires_grad_()
    z = x64 * options.get("logit_scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    theirs = F.cross_entropy(z, q64, w64, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=32 * eps, atol=32 * eps)
    g = torch.randn(5, generator=torch.Generator().manual_seed(3)).double()
    wrt, wrt64 = [v for v in (x, q, w) if v is not None], [v for v in (x64, q64, w64) if v is not None]
    for mine, other in zip(
        torch.autograd.grad(ours, wrt, g.to(ours)), torch.autograd.grad(theirs, wrt64, g), strict=True
    ):
        tolerance = max(torch.finfo(dtype).eps, 64 * eps)
        torch.testing.assert_close(
            mine.cpu().double(), other, rtol=2 * tolerance, atol=64 * eps * other.abs().max().item()
        )


@pytest.mark.parametrize("plain", [False, True], ids=["operator", "plain torch"])
def test_class_probabilities_of_padding_may_hold_anything(device, plain):
    """They count for nothing where the loss passes nothing back, even where the lse does."""
    soft = reference_soft if plain else torch.ops.xent
    x = torch.randn(3, 100, device=device)
    q = torch.randn(3, 100, device=device).softmax(-1)
    lse = soft.soft_cross_entropy_forward(x, q)[1]
    q[1:] = float("nan")
    grad_loss, grad_lse = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]], device=device)
    without = soft.soft_cross_entropy_backward(grad_loss, None, x, q, lse)
    assert without[0].isfinite().all() and without[1:].count_nonzero() == 0
    grad = soft.soft_cross_entropy_backward(grad_loss, grad_lse, x, q, lse)
    torch.testing.assert_close(grad, torch.stack([without[0], without[1], 2 * x[2].softmax(-1)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_class_probabilities_with_an_lse_of_another_dtype(device, dtype):
    """It is rounded, not what is computed from it."""
    x = torch.randn(3, 100, device=device)
    q = torch.randn(3, 100, device=device).softmax(-1)
    lse = torch.logsumexp(x, -1).to(dtype)
    one = torch.ones(3, device=device)
    grad = torch.ops.xent.soft_cross_entropy_backward(one, None, x, q, lse)
    torch.testing.assert_close(grad, reference_soft.soft_cross_entropy_backward(one, None, x, q, lse.float()))
