"""Rows whose logits share a large offset: masked rows, and logits of 1e4 and more. float64 of the same logits judges."""

import pytest
import torch
import torch.nn.functional as F
from flat_options import FlatOptions

import xent_ops
from xent_ops.kernels import reference, reference_shard

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

MINIMUM = torch.finfo(torch.float32).min
OFFSETS = [0.0, 1e4, 1e6, -1e9, MINIMUM]
CLASSES, TARGET = 203, torch.tensor([4, 202, 77, 0])


def logits_at(offset, device, dtype=torch.float32):
    """(4, CLASSES). The last row is an ordinary one. At -1e9 and below, all classes of the others are equal."""
    logits = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(0))
    logits[:3] = logits[:3] + offset if offset > MINIMUM else torch.finfo(dtype).min
    return logits.to(device, dtype)


def assert_equal(found, wanted, dtype=torch.float32):
    """Each row, by its norm."""
    error = (found.double().cpu() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert (error < {torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]).all(), error


def entropies(logits):
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


LOSSES = {
    "mean": (lambda x, t: xent_ops.cross_entropy(x, t), lambda x, t: F.cross_entropy(x, t)),
    "none": (
        lambda x, t: xent_ops.cross_entropy(x, t, reduction="none", label_smoothing=0.1).sum(),
        lambda x, t: F.cross_entropy(x, t, reduction="sum", label_smoothing=0.1),
    ),
    "one pass": (lambda x, t: xent_ops.cross_entropy(x, t, grad_in_forward=True), lambda x, t: F.cross_entropy(x, t)),
    "one pass with smoothing": (
        lambda x, t: xent_ops.cross_entropy(x, t, grad_in_forward=True, label_smoothing=0.1, softcap=None),
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    ),
    "outputs": (
        lambda x, t: (out := xent_ops.cross_entropy_outputs(x, t)).loss + out.lse[3],
        lambda x, t: F.cross_entropy(x, t) + x[3].logsumexp(0),
    ),
    "log-probabilities and entropies": (
        lambda x, t: (out := xent_ops.token_log_probs(x, t)).entropy.sum() - out.log_probs.sum(),
        lambda x, t: entropies(x).sum() + F.cross_entropy(x, t, reduction="sum"),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("eager_and_dispatched")
def test_losses(device, name, offset, dtype):
    ours, oracle = LOSSES[name]
    x = logits_at(offset, device, dtype).requires_grad_()
    y = x.detach().double().cpu().requires_grad_()
    loss, wanted = ours(x, TARGET.to(device)), oracle(y, TARGET)
    torch.testing.assert_close(loss.double().cpu(), wanted, rtol=1e-6, atol=1e-6)
    assert_equal(*torch.autograd.grad(loss, x), *torch.autograd.grad(wanted, y), dtype)


def test_every_kernel_of_a_row(device, kernels):
    """The row operators of this device, and those of other devices that run here."""
    target = TARGET.to(device)
    for offset in OFFSETS:
        logits = logits_at(offset, device)
        y = logits.double().cpu().requires_grad_()
        (wanted,) = torch.autograd.grad(F.cross_entropy(y, TARGET, reduction="sum"), y)
        _, lse, *_, lse_low = kernels.cross_entropy_forward(logits, target)
        one = torch.ones((), device=device)
        assert_equal(kernels.cross_entropy_backward(one, None, logits, target, lse, lse_low=lse_low), wanted)
        assert_equal(kernels.cross_entropy_with_grad(logits, target, one)[-1], wanted)


HEADS = {
    "mean": lambda x, w, t, b: xent_ops.linear_cross_entropy(x, w, t, linear_bias=b),
    "none": lambda x, w, t, b: xent_ops.linear_cross_entropy(x, w, t, linear_bias=b, reduction="none").mean(),
    "log-probabilities": lambda x, w, t, b: -xent_ops.linear_token_log_probs(x, w, t, linear_bias=b).log_probs.mean(),
    "a function of tokens": lambda x, w, t, b: xent_ops.linear_token_loss(
        x, w, t, lambda stats: -stats.log_probs, linear_bias=b, chunk_rows=2
    ),
}


@pytest.mark.parametrize("offset", [1e6, -1e9])
@pytest.mark.parametrize("name", HEADS)
def test_heads(device, name, offset):
    """The bias brings the offset to all rows."""
    x, target = logits_at(0.0, device).requires_grad_(), TARGET.to(device)
    weight, bias = torch.eye(CLASSES, device=device), torch.full((CLASSES,), offset, device=device)
    y = (x.detach() + offset).double().cpu().requires_grad_()
    wanted = F.cross_entropy(y, TARGET)
    loss = HEADS[name](x, weight, target, bias)
    torch.testing.assert_close(loss.double().cpu(), wanted, rtol=1e-6, atol=1e-6)
    assert_equal(*torch.autograd.grad(loss, x), *torch.autograd.grad(wanted, y))


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("kind", ["operators", "plain torch"])
def test_slices_of_the_classes(device, kind, offset):
    plain = FlatOptions(reference_shard, cross_entropy_backward=reference.cross_entropy_backward)
    kernels = torch.ops.xent if kind == "operators" else plain
    logits, target, sizes = logits_at(offset, device), TARGET.to(device), (100, 103)
    y = logits.double().cpu().requires_grad_()
    wanted = F.cross_entropy(y, TARGET, reduction="none")
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), y)
    slices = [(part.contiguous(), start) for part, start in zip(logits.split(sizes, -1), (0, 100), strict=True)]
    gathered = torch.cat([kernels.cross_entropy_shard(part, target, start, CLASSES) for part, start in slices])
    grads = []
    for part, start in slices:
        joined = kernels.cross_entropy_shard_join(part, target, gathered, start, CLASSES)
        loss, lse, _, _, lse_low = joined
        torch.testing.assert_close(loss.double().cpu(), wanted, rtol=1e-6, atol=1e-6)
        row_args = (torch.ones_like(loss), None, part, target, lse)
        slice_args = {"class_start": start, "num_classes": CLASSES, "lse_low": lse_low}
        grads.append(kernels.cross_entropy_backward(*row_args, **slice_args))
    assert_equal(torch.cat(grads, -1), wanted_grad)


@pytest.mark.parametrize("offset", [1e4, 1e6, -1e9])
def test_slices_of_a_head_with_entropies(device, offset):
    """Losses and entropies were wrong, not only gradients."""
    x, target, ops = logits_at(0.0, device), TARGET.to(device), torch.ops.xent
    weight, bias = torch.eye(CLASSES, device=device), torch.full((CLASSES,), offset, device=device)
    y = (x + offset).double().cpu().requires_grad_()
    wanted, wanted_entropy = F.cross_entropy(y, TARGET, reduction="none"), entropies(y)
    (wanted_grad,) = torch.autograd.grad((wanted + wanted_entropy).sum(), y)
    slices = [(weight[a:b], a, bias[a:b]) for a, b in ((0, 100), (100, CLASSES))]
    gathered = torch.cat(
        [ops.linear_cross_entropy_shard(x, w, target, start, CLASSES, b, None, True) for w, start, b in slices]
    )
    grad = 0
    for w, start, b in slices:
        part = x.clone().requires_grad_()
        joined = ops.linear_cross_entropy_shard_join(part, w, target, gathered, start, CLASSES, b, None, None, True)
        loss, entropy = joined[0], joined[4]
        torch.testing.assert_close(loss.double().cpu(), wanted.detach(), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(entropy.double().cpu(), wanted_entropy.detach(), rtol=1e-6, atol=2e-6)
        grad = grad + torch.autograd.grad((loss + entropy).sum(), part)[0]
    assert_equal(grad, wanted_grad)
