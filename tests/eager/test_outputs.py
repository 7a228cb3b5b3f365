"""What the other public functions return: cross_entropy_outputs and token_log_probs."""

import pytest
import torch

import xent_ops


@pytest.mark.parametrize("grad_in_forward", [False, True], ids=["", "grad_in_forward"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_outputs(device, reduction, grad_in_forward):
    """Which of them are differentiable. Values: tests/fuzz."""
    x, target = (
        torch.randn(6, 30, device=device, requires_grad=True),
        torch.tensor([1, -100, 29, 4, 0, 7], device=device),
    )
    options = {"lse_square_scale": 0.25, "reduction": reduction, "grad_in_forward": grad_in_forward}
    out = xent_ops.cross_entropy_outputs(x, target, **options)
    assert out.predictions.dtype == torch.int64
    assert xent_ops.cross_entropy_outputs(x, target).z_loss == 0
    differentiable = {name for name, value in out._asdict().items() if value.requires_grad}
    more = [] if grad_in_forward else ["lse", *(["z_loss"] if reduction == "none" else [])]
    assert differentiable == {"loss", *more}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
def test_grad_in_forward_with_weights_of_tokens(device, reduction, in_place):
    x = torch.randn(6, 30, device=device, requires_grad=True)
    target, factors = torch.tensor([1, -100, 29, 4, 0, 7], device=device), torch.randn(6, device=device)
    options = {"token_weight": factors, "reduction": reduction, "lse_square_scale": 0.1}
    losses = [
        xent_ops.cross_entropy(x * 1, target, grad_in_forward=ahead, inplace_backward=ahead and in_place, **options)
        for ahead in (False, True)
    ]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), x) for loss in losses))


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16], ids=str)
def test_accuracy_where_torch_makes_half_precision_by_default(device, default):
    """torch divides integers in its default dtype, in which 70000 is inf (float16) or as much as 69994 (bfloat16)."""
    x, target = torch.zeros(70000, 2, device=device), torch.zeros(70000, dtype=torch.int64, device=device)
    target[:6] = 1
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        accuracy = xent_ops.cross_entropy_outputs(x, target).accuracy
    finally:
        torch.set_default_dtype(before)
    assert accuracy.dtype == torch.float32
    torch.testing.assert_close(accuracy, torch.tensor(69994 / 70000, device=device))


@pytest.mark.interpreter
@pytest.mark.parametrize("ignored, dtype", [(-100, torch.int64), (7, torch.uint8), (250, torch.uint8)], ids=str)
@pytest.mark.parametrize("padding", [0.5, float("inf"), float("nan")])
def test_token_log_probs_of_ignored_rows(device, ignored, dtype, padding):
    """Log-probability, entropy and their gradients are 0, whatever the row holds."""
    x = torch.randn(2, 3, 40, device=device)
    x[0, 1] = x[1, 2] = padding
    x.requires_grad_()
    target = torch.tensor([[1, ignored, 39], [0, 5, ignored]], device=device).to(dtype)
    counted = (target.to(torch.int64) != ignored).unsqueeze(-1)
    log_probs, entropy, _ = xent_ops.token_log_probs(x, target, ignore_index=ignored)
    wanted = torch.where(counted, x, 0.0).log_softmax(-1)
    index = torch.where(counted.squeeze(-1), target.to(torch.int64), 0)
    for value, rows in (
        (log_probs, wanted.gather(-1, index.unsqueeze(-1))),
        (entropy, -(wanted.exp() * wanted).sum(-1, keepdim=True)),
    ):
        rows = torch.where(counted, rows, 0.0).squeeze(-1)
        torch.testing.assert_close(value, rows)
        assert value[0, 1] == value[1, 2] == 0
        upstream = torch.rand(2, 3, device=device)
        (grad,) = torch.autograd.grad(value, x, upstream, retain_graph=True)
        assert grad[0, 1].count_nonzero() == grad[1, 2].count_nonzero() == 0
        (other,) = torch.autograd.grad(rows, x, upstream, retain_graph=True)
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-6)
