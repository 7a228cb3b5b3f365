"""grad_in_forward: loss and gradient in one visit of the logits."""

import pytest
import torch
from helpers.dispatch_log import Log

import xent_ops

OPTIONS = {
    "plain": {},
    "z-loss": {"lse_square_scale": 0.1},
    "all": {"label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 5.0, "logit_scale": 0.5},
}


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_grad_in_forward(device, h, target, reduction, name, weighted, in_place):
    """Loss and gradient of the ordinary path, for upstream gradients of one and others, which differ between rows."""
    options = {"reduction": reduction, "weight": torch.rand(30, device=device) if weighted else None, **OPTIONS[name]}
    wanted = xent_ops.cross_entropy(h * 2, target, **options)
    for factor in (1.0, torch.randn(wanted.shape, device=device), 0.0):
        (wanted_grad,) = torch.autograd.grad((wanted * factor).sum(), h, retain_graph=True)
        logits = h * 2
        version, seen = logits._version, []
        logits.register_hook(lambda g, seen=seen: seen.append(g.data_ptr()))
        loss = xent_ops.cross_entropy(logits, target, grad_in_forward=True, inplace_backward=in_place, **options)
        torch.testing.assert_close(loss, wanted)
        (grad,) = torch.autograd.grad((loss * factor).sum(), h)
        torch.testing.assert_close(grad, wanted_grad)
        assert (seen == [logits.data_ptr()]) == in_place == (logits._version > version)


def test_grad_in_forward_below_a_class_dimension_in_the_middle(device):
    h = torch.randn(2, 10, 5, device=device, requires_grad=True)
    target = torch.randint(0, 10, (2, 5), device=device)
    (wanted,) = torch.autograd.grad(xent_ops.cross_entropy(h, target), h)
    for in_place in (False, True):
        loss = xent_ops.cross_entropy(h, target, grad_in_forward=True, inplace_backward=in_place)
        torch.testing.assert_close(torch.autograd.grad(loss, h)[0], wanted)


def test_grad_in_forward_visits_the_logits_once_and_saves_the_gradient_alone(h, target):
    saved = []
    with Log() as log, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = xent_ops.cross_entropy(h, target, grad_in_forward=True)
        assert log.ours() == ["row_divisors", "cross_entropy_with_grad", "row_summary"]
        log.seen.clear()
        loss.backward()
    assert log.ours() == ["scale_grad_"]
    (gradient,) = saved
    assert gradient.shape == h.shape and h.grad.data_ptr() == gradient.data_ptr(), "handed out, not copied"


def test_grad_in_forward_gives_its_gradient_once(h, target):
    loss = xent_ops.cross_entropy(h * 2, target, grad_in_forward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through a loss with grad_in_forward=True"):
        loss.backward()
    with pytest.raises(RuntimeError, match="leaves nothing to differentiate a second time"):
        torch.autograd.grad(xent_ops.cross_entropy(h * 2, target, grad_in_forward=True), h, create_graph=True)


def test_grad_in_forward_without_a_gradient_is_the_plain_forward(h, target):
    kept = h.detach().clone()
    wanted = xent_ops.cross_entropy(kept, target)
    with Log() as log:
        for logits, grad in ((kept, True), (h, False)):
            with torch.set_grad_enabled(grad):
                loss = xent_ops.cross_entropy(logits, target, grad_in_forward=True, inplace_backward=True)
            assert torch.equal(loss, wanted) and not loss.requires_grad
    assert log.ours() == ["cross_entropy_reduced"] * 2
    assert torch.equal(kept, h)


def test_with_grad_checks_weights_before_it_counts_rows(h, target):
    for weight, message in (
        (torch.ones(3), r"weight has shape \(3,\)"),
        (torch.ones(h.shape[-1], 2), "weight has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            xent_ops.cross_entropy(h * 2, target, weight.to(h), grad_in_forward=True)
