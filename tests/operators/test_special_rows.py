"""Rows that are ignored, out of range, infinite or NaN, and no rows at all."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from against_oracle import row_case

import xent_ops
from xent_ops.testing import realistic_logits

pytestmark = pytest.mark.interpreter


@pytest.mark.usefixtures("eager_and_dispatched")
def test_infinite_logits_follow_torch(device):
    inf = float("inf")
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    logits[0, :290] = -inf  # most of the row, the leading tile of small tiles among it
    logits[1] = -inf
    logits[2, 5] = inf
    logits[3, 7] = float("nan")
    logits[4, 9] = -inf  # the target itself
    target = torch.tensor([295, 3, 4, 5, 9, 1])
    for options in ({}, {"label_smoothing": 0.125}):
        x, y = logits.to(device).requires_grad_(), logits.to(device).requires_grad_()
        ours = xent_ops.cross_entropy(x, target.to(device), reduction="none", **options)
        theirs = F.cross_entropy(y, target.to(device), reduction="none", **options)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        ours.sum().backward()
        theirs.sum().backward()
        torch.testing.assert_close(x.grad, y.grad, equal_nan=True)


def test_leading_tiles_of_minus_infinity(device):
    logits = realistic_logits(2, 20000, dtype=torch.bfloat16)
    logits[:, :12000] = float("-inf")
    row_case(device, logits, torch.tensor([12000, 19999]))


@pytest.mark.parametrize("bad", [50, -1, 10**10, -(10**10)])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 5.0}], ids=["plain", "options"])
def test_target_out_of_range(device, raises_out_of_range, bad, options):
    logits = realistic_logits(3, 50, dtype=torch.float32).to(device).requires_grad_()
    target = torch.tensor([4, bad, 5], device=device)
    weight = torch.rand(50, device=device)
    calls = {
        "forward": lambda w: torch.ops.xent.cross_entropy_forward(logits, target, w, **options)[0],
        "argmax": lambda w: torch.ops.xent.cross_entropy_forward(logits, target, w, True, **options)[0],
        "entropy": lambda w: torch.ops.xent.cross_entropy_forward(logits, target, w, False, True, **options)[0],
    }
    for call, w in itertools.product(calls.values(), (None, weight)):
        if raises_out_of_range:
            with pytest.raises(IndexError, match=rf"target {bad} is out of bounds: valid are 0 to 49"):
                call(w)
            continue
        loss = call(w)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert loss.isnan().tolist() == [False, True, False]
        assert grad.isnan().all(-1).tolist() == grad.isnan().any(-1).tolist() == [False, True, False]
    if not raises_out_of_range:
        for w in (None, weight):
            assert xent_ops.cross_entropy(logits, target, w, **options).isnan()
    with pytest.raises(IndexError, match=rf"target {bad} is out of bounds"):
        xent_ops.check_targets(target, 50)
    xent_ops.check_targets(target, 50, ignore_index=bad)


@pytest.mark.usefixtures("eager_and_dispatched")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
def test_all_rows_ignored_and_no_rows(device, reduction, weighted):
    """Mean is NaN as in torch, sum 0; the gradient of ignored rows is exactly zero whatever they hold."""
    weight = torch.rand(40, device=device) if weighted else None
    for rows in (0, 3):
        x = torch.randn(rows, 40, device=device, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        target = torch.full((rows,), -100, device=device)
        ours = xent_ops.cross_entropy(x, target, weight, reduction=reduction)
        theirs = F.cross_entropy(y, target, weight, reduction=reduction)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        (ours.nan_to_num() if reduction == "mean" else ours).sum().backward()
        assert x.grad.shape == (rows, 40)
        if reduction != "mean":
            assert x.grad.count_nonzero() == 0


def test_entropy_of_padding_may_be_nan(device, kernels):
    x = torch.randn(4, 100, device=device)
    x[1], x[2] = float("nan"), float("inf")
    target = torch.tensor([3, -100, 5, 4], device=device)
    grad_loss, grad_entropy = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]], device=device)
    _, lse, _, entropy, _ = kernels.cross_entropy_forward(x, target, None, False, True)
    grad = kernels.cross_entropy_backward(grad_loss, None, x, target, lse, None, None, grad_entropy, entropy)
    assert grad.isfinite().all() and grad[1:3].count_nonzero() == 0 and grad[[0, 3]].count_nonzero() == 200
    # In one visit; 0 * inf of the third row's lse is torch's own arithmetic.
    grad = kernels.cross_entropy_with_grad(x, target, grad_loss, grad_loss / 8)[-1]
    assert grad[[0, 1, 3]].isfinite().all() and grad[1].count_nonzero() == 0


@pytest.mark.parametrize("rows", [2, 5])  # fewer than the interpreter's processors, and more
@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_weight_of_an_ignored_class_may_be_infinite(device, kernels, ignore_index, rows):
    """One over its number of targets: class 0 has none."""
    x = realistic_logits(rows, 100, dtype=torch.float32).to(device).requires_grad_()
    target = torch.tensor([3, ignore_index, 99, 4, 7], device=device)[:rows]
    weight = torch.rand(100, generator=torch.Generator().manual_seed(2)).to(device)
    weight[0] = float("inf")
    theirs = F.cross_entropy(x, target, weight, ignore_index=ignore_index, reduction="none")
    (wanted,) = torch.autograd.grad(theirs.sum(), x)
    options = {"ignore_index": ignore_index}
    loss, lse, *_ = kernels.cross_entropy_forward(x.detach(), target, weight, **options)
    grad = kernels.cross_entropy_backward(torch.ones_like(loss), None, x.detach(), target, lse, weight, **options)
    one = torch.ones((), device=device)
    both = kernels.cross_entropy_with_grad(x.detach(), target, one, None, weight, **options)
    for found, made in ((loss, grad), (both[0], both[-1])):
        torch.testing.assert_close(found, theirs.detach())
        torch.testing.assert_close(made, wanted)
        assert made.isfinite().all() and made[1].count_nonzero() == 0


def test_upstream_gradients_that_cancel_do_not_hide_an_infinite_logit(device, kernels):
    x, target = torch.randn(1, 40, device=device), torch.tensor([1], device=device)
    x[0, 7] = float("inf")
    lse = kernels.cross_entropy_forward(x, target)[1]
    one = torch.ones(1, device=device)
    assert kernels.cross_entropy_backward(one, -one, x, target, lse).isnan().any()
