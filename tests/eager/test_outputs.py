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
