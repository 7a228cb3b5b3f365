"""Rows whose logits share a large offset: masked rows, and logits of 1e4 and more. float64 of the same logits judges."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from flat_options import FlatOptions
from helpers.covering import covering
from helpers.divergence_oracle import divergences
from helpers.interpreter import INTERPRETED

import xent_ops
from xent_ops import outputs
from xent_ops.kernels import reference, reference_divergences, reference_shard

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

MINIMUM = torch.finfo(torch.float32).min
# Of a row's gradient, by its norm. The largest of float32 are those of the JSD, at every offset and at none (C++ 5.0e-7,
# Triton's interpreter 5.2e-7): log s - log m is a small difference of two rounded numbers. Cross entropy has 3e-8. The
# interpreter cuts bfloat16 off instead of rounding it.
NEAR = {torch.float32: 7e-7, torch.bfloat16: 8e-3 if INTERPRETED else 4e-3}
OFFSETS = [0.0, 1e4, 1e6, -1e9, MINIMUM]
CLASSES, TARGET = 203, torch.tensor([4, 202, 77, 0])
IDS = torch.tensor([[4, 202, 4], [202, 0, -100], [77, -100, 12], [0, 1, 2]])
PROBS = torch.tensor([0.5, 0.25, 0.125]).expand(4, 3)


def logits_at(offset, device, dtype=torch.float32):
    """(4, CLASSES). The last row is an ordinary one. At -1e9 and below, all classes of the others are equal."""
    logits = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(0))
    logits[:3] = logits[:3] + offset if offset > MINIMUM else torch.finfo(dtype).min
    return logits.to(device, dtype)


def assert_equal(found, wanted, dtype=torch.float32):
    """Each row, by its norm. The gradient of two models that are equal is 0."""
    error = (found.double().cpu() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-2)
    assert (error < NEAR[dtype]).all(), error


def teacher_at(offset, device, dtype=torch.float32):
    """Logits of another model. The first row is at the same offset, the others are ordinary ones."""
    logits = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(1))
    logits[0] = logits[0] + offset if offset > MINIMUM else torch.finfo(dtype).min
    return logits.to(device, dtype)


def log_probs_of_ids(logits):
    at_ids = logits.log_softmax(-1).gather(-1, IDS.clamp(min=0))
    return torch.where(IDS == -100, 0.0, at_ids)


def teachers_top_k(logits, tail):
    """-sum p log q, with the remainder on the sum of all other classes. Equal ids are one class."""
    log_q, p = logits.log_softmax(-1), torch.where(IDS == -100, 0.0, PROBS).double()
    loss = -(p * log_q.gather(-1, IDS.clamp(min=0))).sum(-1)
    if tail:
        named = torch.zeros_like(log_q).scatter_add(-1, IDS.clamp(min=0), (IDS != -100).double())
        loss = loss - (1 - p.sum(-1)) * log_q.masked_fill(named > 0, float("-inf")).logsumexp(-1)
    return loss.mean()


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
    "several classes": (
        lambda x, t: (
            (out := xent_ops.token_log_probs(x, IDS.to(x.device))).entropy.sum() - out.log_probs.square().sum()
        ),
        lambda x, t: entropies(x).sum() - log_probs_of_ids(x).square().sum(),
    ),
    "a function of several classes": (
        lambda x, t: xent_ops.token_loss(x, IDS.to(x.device), lambda stats: stats.log_probs.square().sum(-1)),
        lambda x, t: log_probs_of_ids(x).square().sum(-1).mean(),
    ),
    "most probable": (
        lambda x, t: (out := xent_ops.top_k(x, 1, t)).target_log_probs.sum() + out.entropy.sum() - out.log_probs.sum(),
        lambda x, t: (
            entropies(x).sum()
            - x.log_softmax(-1).gather(-1, x.argmax(-1, keepdim=True)).sum()
            - F.cross_entropy(x, t, reduction="sum")
        ),
    ),
    "a teacher's top k": (
        lambda x, t: xent_ops.top_k_distillation_loss(x, IDS.to(x.device), PROBS.to(x.device)),
        lambda x, t: teachers_top_k(x, False),
    ),
    "a teacher's top k with a tail": (
        lambda x, t: xent_ops.top_k_distillation_loss(x, IDS.to(x.device), PROBS.to(x.device), tail=True),
        lambda x, t: teachers_top_k(x, True),
    ),
}


def fields_of(d):
    return d.kl + 2 * d.reverse_kl + 3 * d.jsd - d.overlap - d.log_prob


TWO_MODELS = {
    "kl": lambda x, y, t: xent_ops.distillation_loss(x, y),
    "reverse kl": lambda x, y, t: xent_ops.distillation_loss(x, y, beta=1.0),
    "jsd": lambda x, y, t: xent_ops.distillation_loss(x, y, beta=0.5),
    "with targets": lambda x, y, t: xent_ops.distillation_loss(x, y, target=t, hard_weight=0.5, temperature=2.0),
    "fields": lambda x, y, t: xent_ops.distillation_token_loss(x, y, fields_of, target=t),
}
FIXED = {
    "kl": {"fields": "kl"},
    "reverse kl": {"fields": "reverse_kl"},
    "jsd": {"fields": "mixture"},
    "with targets": {"fields": "kl,log_prob", "hard_weight": 0.5, "temperature": 2.0},
}
ORACLES = {
    "kl": lambda x, y, t: divergences(x, y).kl,
    "reverse kl": lambda x, y, t: divergences(x, y).reverse_kl,
    "jsd": lambda x, y, t: divergences(x, y).jsd,
    "with targets": lambda x, y, t: (d := divergences(x, y, t, temperature=2.0)).kl - 0.5 * d.log_prob,
    "fields": lambda x, y, t: fields_of(divergences(x, y, t)),
}


@pytest.mark.parametrize("name, offset, dtype", covering(LOSSES, OFFSETS, [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.usefixtures("eager_and_dispatched")
def test_losses(device, name, offset, dtype):
    ours, oracle = LOSSES[name]
    x = logits_at(offset, device, dtype).requires_grad_()
    y = x.detach().double().cpu().requires_grad_()
    loss, wanted = ours(x, TARGET.to(device)), oracle(y, TARGET)
    torch.testing.assert_close(loss.double().cpu(), wanted, rtol=1e-6, atol=1e-6)
    assert_equal(*torch.autograd.grad(loss, x), *torch.autograd.grad(wanted, y), dtype)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", TWO_MODELS)
def test_two_models(device, name, offset):
    x, y = logits_at(offset, device).requires_grad_(), teacher_at(offset, device)
    wide = x.detach().double().cpu().requires_grad_()
    loss = TWO_MODELS[name](x, y, TARGET.to(device))
    wanted = ORACLES[name](wide, y.double().cpu(), TARGET).mean()
    torch.testing.assert_close(loss.double().cpu(), wanted, rtol=1e-6, atol=1e-6)
    assert_equal(*torch.autograd.grad(loss, x), *torch.autograd.grad(wanted, wide))


@pytest.mark.parametrize("offset", OFFSETS)
def test_equal_models(device, offset):
    """They overlap by one, and no divergence is more than rounding."""
    x = logits_at(offset, device)
    values, _ = torch.ops.xent.divergences_forward(
        x, x.clone(), TARGET.to(device), fields="kl,reverse_kl,mixture,overlap"
    )
    assert values[:3].abs().max() < 1e-6 and (values[3] - 1).abs().max() < 1e-6


def test_every_kernel_of_two_models(device):
    """In one pass, by the operator and in plain torch."""
    target, one = TARGET.to(device), torch.ones((), device=device)
    plain = FlatOptions(reference_divergences)
    for offset, (name, keywords) in itertools.product(OFFSETS, FIXED.items()):
        x, y = logits_at(offset, device), teacher_at(offset, device)
        wide = x.double().cpu().requires_grad_()
        (wanted,) = torch.autograd.grad(ORACLES[name](wide, y.double().cpu(), TARGET).sum(), wide)
        for kernels in (torch.ops.xent, plain):
            assert_equal(kernels.divergences_with_grad(x, y, target, one, **keywords)[-1], wanted)


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
    "several classes": lambda x, w, t, b: -xent_ops.linear_token_log_probs(x, w, t[:, None], linear_bias=b)[0].mean(),
    "a function of several classes": lambda x, w, t, b: xent_ops.linear_token_loss(
        x, w, t[:, None], lambda stats: -stats.log_probs.sum(-1), linear_bias=b, chunk_rows=2
    ),
    "most probable": lambda x, w, t, b: -xent_ops.linear_top_k(x, w, 3, t, linear_bias=b).target_log_probs.mean(),
    "a teacher's top k": lambda x, w, t, b: xent_ops.linear_top_k_distillation_loss(
        x, w, t[:, None], torch.ones(4, 1, device=x.device), linear_bias=b, chunk_rows=2
    ),
    "a teacher's top k with a tail": lambda x, w, t, b: xent_ops.linear_top_k_distillation_loss(
        x, w, t[:, None], torch.ones(4, 1, device=x.device), tail=True, linear_bias=b, reduction="none"
    ).mean(),
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


@pytest.mark.parametrize("offset", [1e4, 1e6, -1e9])
def test_slices_of_a_head_with_several_classes(device, offset):
    x, ids, ops = logits_at(0.0, device), IDS.to(device), torch.ops.xent
    target = ops.row_targets(ids)
    weight, bias = torch.eye(CLASSES, device=device), torch.full((CLASSES,), offset, device=device)
    y = (x + offset).double().cpu().requires_grad_()
    wanted = log_probs_of_ids(y)
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), y)
    slices = [(weight[a:b], a, bias[a:b]) for a, b in ((0, 100), (100, CLASSES))]
    gathered = torch.cat(
        [ops.linear_cross_entropy_shard(x, w, target, start, CLASSES, b, None, False, ids) for w, start, b in slices]
    )
    grad = 0
    for w, start, b in slices:
        part, more = x.clone().requires_grad_(), (b, None, None, False, ids)
        _, lse, *_, low, at_ids = ops.linear_cross_entropy_shard_join(part, w, target, gathered, start, CLASSES, *more)
        log_probs = outputs.log_probs_of_ids(at_ids, lse, low, ids, -100)
        torch.testing.assert_close(log_probs.double().cpu(), wanted.detach(), rtol=1e-6, atol=1e-6)
        grad = grad + torch.autograd.grad(log_probs.square().sum(), part)[0]
    assert_equal(grad, wanted_grad)
