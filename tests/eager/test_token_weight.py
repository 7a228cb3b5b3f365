"""Weights of targets: what they mean, which operators run, what is refused. Random options: tests/fuzz."""

import math

import pytest
import torch
from helpers.dispatch_log import Log
from helpers.heads import random_head

import xent_ops

V = 30


def problem(device, dtype=torch.float64):
    x, head, _, target = random_head(device, dtype, (3, 4), V, ignored=[1, 2])
    return x, head, target, (torch.rand(3, 4) + 0.5).to(device)


def linear(x, head, target, **options):
    return xent_ops.linear_cross_entropy(x, head, target, **options)


def of_logits(x, head, target, **options):
    return xent_ops.cross_entropy(x @ head.t(), target, dim=-1, **options)


def outputs(x, head, target, **options):
    return xent_ops.linear_cross_entropy_outputs(x, head, target, **options).loss


WAYS = pytest.mark.parametrize("way", [linear, of_logits, outputs], ids=lambda way: way.__name__)


def losses_of_rows(x, head, target, **options):
    return xent_ops.cross_entropy(x @ head.t(), target, dim=-1, reduction="none", **options)


def test_a_mean_with_class_weights(device):
    """The loss is divided by the sum of both weights, the z-loss by that of the targets' own."""
    x, head, target, factors = problem(device)
    weight, counted = torch.rand(V, device=device, dtype=torch.float64), target != -100
    plain = {"softcap": 5.0, "weight": weight}
    loss = losses_of_rows(x, head, target, **plain)
    both = losses_of_rows(x, head, target, lse_square_scale=0.1, **plain)
    of_targets = (factors[counted] * weight[target[counted]]).sum()
    wanted = (loss * factors).sum() / of_targets + ((both - loss) * factors).sum() / factors[counted].sum()
    for way in (linear, of_logits, outputs):
        found = way(x, head, target, token_weight=factors, lse_square_scale=0.1, **plain)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(
            torch.autograd.grad(found, (x, head)), torch.autograd.grad(wanted, (x, head), retain_graph=True)
        )


@WAYS
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16], ids=str)
def test_a_mask(device, way, dtype):
    """0 leaves a target out as ignore_index does, whatever its loss is."""
    x, head, target, _ = problem(device, torch.float32)
    mask = torch.arange(12, device=device).view(3, 4) % 3 > 0
    x.data[0, 0] = math.inf  # masked
    loss = way(x, head, target, token_weight=mask.to(dtype))
    torch.testing.assert_close(loss, way(x, head, target.masked_fill(~mask, -100)))


def of_two_heads(x, head, target, **options):
    return xent_ops.linear_distillation_loss(x, head, x.detach().flip(1), head.detach(), target=target, **options)


def of_two_logits(x, head, target, **options):
    logits = x @ head.t()
    return xent_ops.distillation_loss(logits, logits.detach().flip(1), target=target, **options)


def top_k(x, head, target, tail=True, **options):
    ids = torch.where(target == -100, -100, torch.stack([target, target + 1, target + 2]) % V).movedim(0, -1)
    return xent_ops.top_k_distillation_loss(x @ head.t(), ids, torch.full_like(x[..., :3], 0.2), tail=tail, **options)


def linear_top_k(x, head, target, tail=True, **options):
    ids = torch.where(target == -100, -100, torch.stack([target, target + 1, target + 2]) % V).movedim(0, -1)
    probs = torch.full_like(x[..., :3], 0.2)
    return xent_ops.linear_top_k_distillation_loss(x, head, ids, probs, tail=tail, **options)


def in_forward(x, head, target, **options):
    return of_logits(x, head, target, grad_in_forward=True, **options)


ALL = (linear, of_logits, outputs, in_forward, of_two_heads, of_two_logits, top_k, linear_top_k)


def assert_nan(way, step, x, head, target, zeros):
    loss, counted = step(x, head, target, token_weight=zeros), target != -100
    of_x, of_head = torch.autograd.grad(loss, (x, head))
    assert loss.isnan() and of_head.isnan().all(), way
    assert of_x[counted].isnan().all() and (of_x[~counted] == 0).all(), way


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_mean_of_weights_that_are_all_0(device, dtype):
    """As F.cross_entropy with class weights of 0: loss and gradients of counted rows are NaN, those of others 0."""
    for way in ALL:
        x, head, target, factors = problem(device, dtype)
        for zeros in (factors * 0, (factors * 0).bool()):
            assert_nan(way, way, x, head, target, zeros)


def test_a_mean_of_weights_that_are_all_0_compiled(device):
    for way in ALL:
        torch.compiler.reset()
        x, head, target, factors = problem(device, torch.float32)
        assert_nan(way, torch.compile(way, backend="aot_eager", fullgraph=True), x, head, target, factors * 0)


@pytest.mark.parametrize("skip_ignored", [False, True])
def test_three_products(device, skip_ignored):
    x, head, target, factors = problem(device, torch.float32)
    with Log() as log:
        loss = linear(x, head, target, token_weight=factors, chunk_rows=5, skip_ignored=skip_ignored)
    assert log.ours() == ["linear_cross_entropy_with_grad"]
    first = torch.autograd.grad(loss, (x, head), retain_graph=True)
    with Log() as log:
        again = torch.autograd.grad(loss, (x, head))
    assert "linear_cross_entropy_backward" in log.ours()  # the logits are made again
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(first, torch.autograd.grad(linear(x, head, target, token_weight=factors), (x, head)))


def test_one_is_no_weight(device):
    """Bit for bit."""
    x, head, target, factors = problem(device, torch.bfloat16)
    ones = torch.ones_like(factors)
    for reduction in ("mean", "sum"):
        results = []
        for given in ({}, {"token_weight": ones}):
            loss = linear(x, head, target, reduction=reduction, lse_square_scale=0.1, **given)
            results.append((loss, *torch.autograd.grad(loss, (x, head))))
        for mine, other in zip(*results, strict=True):
            assert torch.equal(mine, other)


def test_depths_of_one_head(device):
    """Multi-token prediction: rows of all depths at once, each with its share."""
    x, head, target, _ = problem(device)
    deeper = (x * 0.9, target.roll(1, 1))
    apart = linear(x, head, target, reduction="sum") + 0.3 * linear(deeper[0], head, deeper[1], reduction="sum")
    shares = torch.tensor([1.0, 0.3], device=device).view(2, 1, 1).expand(2, 3, 4)
    together = linear(
        torch.stack([x, deeper[0]]), head, torch.stack([target, deeper[1]]), token_weight=shares, reduction="sum"
    )
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(torch.autograd.grad(together, head), torch.autograd.grad(apart, head))


def test_modules_and_transforms(device):
    x, head, target, factors = problem(device)
    module = xent_ops.LinearCrossEntropyLoss(tied_weight=torch.nn.Parameter(head.detach()))
    torch.testing.assert_close(module(x, target, token_weight=factors), linear(x, head, target, token_weight=factors))
    logits = x.detach() @ head.detach().t()
    wanted = of_logits(x, head, target, token_weight=factors)
    torch.testing.assert_close(xent_ops.CrossEntropyLoss(dim=-1)(logits, target, factors), wanted.detach())

    def loss(logits):
        return xent_ops.cross_entropy(logits, target, dim=-1, token_weight=factors)

    leaf = logits.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(logits), torch.autograd.grad(loss(leaf), leaf)[0])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(device, backend):
    x, head, target, factors = problem(device, torch.float32)
    for way in (linear, of_logits):

        def step(x, head, factors, way=way):
            return way(x, head, target, token_weight=factors, lse_square_scale=0.1)

        loss, compiled = step(x, head, factors), torch.compile(step, fullgraph=True, backend=backend)(x, head, factors)
        torch.testing.assert_close(compiled, loss)
        torch.testing.assert_close(torch.autograd.grad(compiled, (x, head)), torch.autograd.grad(loss, (x, head)))


@WAYS
def test_refused(way):
    x, head, target, factors = problem("cpu")
    for token_weight, error, text in (
        (factors[0], ValueError, r"token_weight has shape \(4,\); expected \(3, 4\), one number for each target"),
        (factors.requires_grad_(), RuntimeError, "token_weight requires grad"),
        (2.0, TypeError, "token_weight must be a torch.Tensor, got .*float"),
        (factors.detach().to(torch.complex64), TypeError, "expected real numbers"),
        (factors.detach().to("meta"), Exception, "token_weight is on meta"),
    ):
        with pytest.raises(error, match=text):
            way(x, head, target, token_weight=token_weight)


def test_refused_combinations():
    x, head, target, factors = problem("cpu")
    logits = (x @ head.t()).detach()
    with pytest.raises(ValueError, match="token_weight is not supported by inplace_backward=True without"):
        xent_ops.cross_entropy(logits, target, dim=-1, token_weight=factors, inplace_backward=True)
    with pytest.raises(ValueError, match="token_weight is not supported by class probabilities"):
        xent_ops.cross_entropy(logits, logits.softmax(-1), dim=-1, token_weight=factors)


@pytest.mark.parametrize("loss", ["logits", "head"])
def test_nan_weights_of_ignored_rows_reach_no_second_derivative(device, loss):
    x = torch.randn(4, 9, device=device, dtype=torch.float64, requires_grad=True)
    head = torch.eye(9, device=device, dtype=torch.float64)
    target, scale = torch.tensor([1, -100, 3, 4], device=device), torch.ones((), device=device, requires_grad=True)
    grads = []
    for weight in (float("nan"), 1.0):
        options = {"token_weight": torch.tensor([1.0, weight, 0.5, 2.0], device=device)}
        if loss == "logits":
            value = xent_ops.cross_entropy(x, target, **options)
        else:
            value = xent_ops.linear_cross_entropy(x, head, target, **options)
        (first,) = torch.autograd.grad(value * scale, x, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), scale)[0])
    assert grads[0].isfinite() and torch.equal(*grads)
