"""Predictions and entropies of the operators that return them beside the loss."""

import pytest
import torch

import xent_ops
from xent_ops.kernels import reference
from xent_ops.testing import realistic_logits

pytestmark = pytest.mark.interpreter


def test_argmax_takes_the_first_index_on_ties(device):
    logits = torch.zeros(5, 5000)
    logits[1, [4321, 17]] = 2.0
    logits[2, 4999] = 1.0
    logits[3] = float("-inf")
    logits[4, 1000:] = -1.0
    target = torch.arange(5)
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(device, dtype)
        _, _, argmax, entropy, _ = torch.ops.xent.cross_entropy_forward(x, target.to(device), None, True, softcap=0.5)
        assert entropy.shape == (0,)
        assert argmax.dtype == torch.int64
        assert argmax.tolist() == [0, 17, 4999, 0, 0]
    x = realistic_logits(20, 3333, dtype=torch.bfloat16).to(device)
    zeros = torch.zeros(20, dtype=torch.int64, device=device)
    argmax = torch.ops.xent.cross_entropy_forward(x, zeros, with_argmax=True)[2]
    assert torch.equal(argmax, x.float().argmax(-1))


@pytest.mark.parametrize("classes", [1, 64, 100, 1024, 5001])
def test_argmax_of_rows_without_a_number_is_the_first_column(device, kernels, classes):
    for value in (float("nan"), float("-inf")):
        x = torch.full((5, classes), value, device=device)
        target = torch.zeros(5, dtype=torch.int64, device=device)
        assert kernels.cross_entropy_forward(x, target, None, True)[2].tolist() == [0] * 5


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_entropy(device, dtype, softcap):
    """Against torch.distributions in float64, with masked classes and gradients of all three outputs."""
    logits = realistic_logits(6, 1003, dtype=dtype)
    logits[3, 100:] = float("-inf")
    target = torch.tensor([0, 1002, 5, 6, -100, 7])
    x = logits.to(device).requires_grad_()
    log_probs, entropy, lse = xent_ops.token_log_probs(x, target.to(device), logit_scale=0.5, softcap=softcap)
    z = logits.double().requires_grad_()
    scores = z * 0.5 if softcap is None else softcap * torch.tanh(z * 0.5 / softcap)
    p = torch.distributions.Categorical(logits=scores)
    log_p = torch.log_softmax(scores, -1)
    wanted_entropy = -torch.where(p.probs == 0, 0.0, p.probs * log_p.clamp(min=-1e9)).sum(-1)
    wanted_entropy = torch.where(target >= 0, wanted_entropy, 0)
    wanted_log = torch.where(target >= 0, log_p.gather(-1, target.clamp(min=0)[:, None])[:, 0], 0)
    eps = torch.finfo(entropy.dtype).eps
    torch.testing.assert_close(entropy.cpu().double(), wanted_entropy, rtol=32 * eps, atol=32 * eps)
    torch.testing.assert_close(log_probs.cpu().double(), wanted_log, rtol=32 * eps, atol=32 * eps)
    g = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()
    (ours,) = torch.autograd.grad((log_probs, entropy, lse), x, [v.to(entropy) for v in g])
    (theirs,) = torch.autograd.grad((wanted_log, wanted_entropy, torch.logsumexp(scores, -1)), z, list(g))
    tolerance = max(torch.finfo(dtype).eps, 64 * eps)
    torch.testing.assert_close(
        ours.cpu().double(), theirs, rtol=2 * tolerance, atol=tolerance * theirs.abs().max().item() / 8
    )


@pytest.mark.parametrize("classes", [64, 5001])
def test_the_entropy_of_an_ignored_row_is_zero(device, kernels, classes):
    """And no gradient flows back from it, even if the upstream gradient is NaN."""
    logits = realistic_logits(4, classes, dtype=torch.float32).to(device)
    target = torch.tensor([1, -100, 3, -100], device=device)
    ignored = target == -100
    _, lse, _, entropy, lse_low = kernels.cross_entropy_forward(logits, target, None, False, True)
    assert torch.equal(entropy == 0, ignored)
    zero, upstream = torch.zeros((), device=device), torch.tensor([1.0, float("nan"), 2.0, 3.0], device=device)
    backward_args = (zero, None, logits, target, lse, None, None, upstream, entropy)
    grad = kernels.cross_entropy_backward(*backward_args, None, 0, None, None, lse_low)
    assert grad.isfinite().all() and torch.equal(grad.any(-1), ~ignored)


def test_large_common_offset_keeps_the_entropy(device, kernels):
    """Not made from the lse, which is off by 1e-3 there."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) + 3e4
    entropy = kernels.cross_entropy_forward(logits.to(device), torch.arange(4, device=device), None, False, True)[3]
    wanted = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(entropy.cpu().double(), wanted, rtol=1e-5, atol=0)


def test_second_derivatives_of_the_entropy_pass_masked_classes(device):
    """A logit of -inf changes those of the others as little as a column that is left out."""
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    target, factor = torch.tensor([0, 1], device=device), torch.arange(5.0, dtype=torch.float64, device=device)

    def derivatives(x, columns):
        x.requires_grad_()
        entropy = torch.ops.xent.cross_entropy_forward(x, target, with_entropy=True)[3]
        (grad,) = torch.autograd.grad(entropy.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((grad[:, columns] * factor).sum(), x)
        return grad.detach()[:, columns], second[:, columns]

    kept = torch.tensor([0, 1, 2, 4, 5], device=device)
    masked = logits.clone()
    masked[:, 3] = float("-inf")
    wanted = derivatives(logits[:, kept], slice(None))
    torch.testing.assert_close(derivatives(masked, kept), wanted)
    masked = masked.detach().requires_grad_()
    (grad,) = torch.autograd.grad(reference.statistics(masked, target, with_entropy=True)[3].sum(), masked)
    torch.testing.assert_close(grad[:, kept], wanted[0])
