"""functorch transforms and forward-mode AD of the public functions, against F.cross_entropy under the same transform."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import xent_ops

TARGET = torch.tensor([1, 0, -100, 3])


@pytest.fixture
def x(device):
    return torch.randn(4, 6, device=device, dtype=torch.float64)


def pair(device, **options):
    target = TARGET.to(device)
    return (
        lambda x: xent_ops.cross_entropy(x, target, **options),
        lambda x: F.cross_entropy(x, target, **options),
    )


TRANSFORMS = {
    "grad": lambda f, x: grad(f)(x),
    "grad of grad": lambda f, x: grad(lambda y: grad(f)(y).square().sum())(x),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, 2 * x, -x])),
    "vmap of another dimension": lambda f, x: vmap(f, in_dims=1)(torch.stack([x, 2 * x], 1)),
    "vmap of vmap": lambda f, x: vmap(vmap(f))(torch.stack([x, 2 * x, -x, x]).view(2, 2, *x.shape)),
    "vmap of grad": lambda f, x: vmap(grad(f))(torch.stack([x, 2 * x])),
    "grad of vmap": lambda f, x: grad(lambda y: vmap(f)(y).sum())(torch.stack([x, 2 * x])),
    "jacrev": lambda f, x: jacrev(f)(x),
    "hessian": lambda f, x: hessian(f)(x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(f))(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones_like(f(x)))[0],
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda f, x: jacfwd(f)(x),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(x, device, name, reduction):
    if reduction == "none" and "grad" in name:
        pytest.skip("grad wants a scalar")
    ours, theirs = pair(device, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(TRANSFORMS[name](ours, x), TRANSFORMS[name](theirs, x))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_of_class_probabilities(x, device, name):
    target = torch.rand(4, 6, device=device, dtype=torch.float64).softmax(-1)
    ours = lambda x: xent_ops.cross_entropy(x, target, label_smoothing=0.1)  # noqa: E731
    theirs = lambda x: F.cross_entropy(x, target, label_smoothing=0.1)  # noqa: E731
    torch.testing.assert_close(TRANSFORMS[name](ours, x), TRANSFORMS[name](theirs, x))


def test_per_sample_gradients_of_a_model(device):
    """vmap(grad) over samples and targets, parameters shared: the recipe of torch.func's tutorial."""
    w = torch.randn(5, 6, device=device, dtype=torch.float64)
    samples = torch.randn(7, 5, device=device, dtype=torch.float64)
    targets = torch.randint(0, 6, (7,), device=device)

    def loss(function):
        return lambda w, s, t: function((s @ w).unsqueeze(0), t.unsqueeze(0))

    ours = vmap(grad(loss(xent_ops.cross_entropy)), in_dims=(None, 0, 0))(w, samples, targets)
    theirs = vmap(grad(loss(F.cross_entropy)), in_dims=(None, 0, 0))(w, samples, targets)
    assert ours.shape == (7, 5, 6)
    torch.testing.assert_close(ours, theirs)


def test_forward_mode_with_dual_numbers(x, device):
    ours, theirs = pair(device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        torch.testing.assert_close(
            forward_ad.unpack_dual(ours(dual)).tangent, forward_ad.unpack_dual(theirs(dual)).tangent
        )


def test_forward_mode_over_the_backward(x, device):
    """Of a loss that was made before: the upstream gradient alone has a tangent."""

    def tangent(loss):
        leaf = x.clone().requires_grad_()
        value = loss(leaf)
        with forward_ad.dual_level():
            upstream = forward_ad.make_dual(torch.ones_like(value), torch.full_like(value, 2.0))
            return forward_ad.unpack_dual(torch.autograd.grad(value, leaf, upstream)[0]).tangent

    torch.testing.assert_close(*map(tangent, pair(device)))


def test_the_composite_operator_refuses_forward_mode(x, device):
    with pytest.raises(NotImplementedError, match=r"torch\.ops\.xent\.cross_entropy inside"):
        jvp(lambda x: torch.ops.xent.cross_entropy(x, TARGET.to(device)), (x,), (x,))


def test_vmap_over_class_weights(x, device):
    weights = torch.rand(3, 6, device=device, dtype=torch.float64)
    ours, theirs = (
        vmap(lambda w, f=f: f(x, TARGET.to(device), w))(weights) for f in (xent_ops.cross_entropy, F.cross_entropy)
    )
    torch.testing.assert_close(ours, theirs)


def test_compiled_transforms(x, device):
    """Of the logits themselves, of what they come from, and twice."""
    target, options = TARGET.to(device), {"lse_square_scale": 0.1, "softcap": 5.0}

    def loss(x):
        return xent_ops.cross_entropy(x, target, **options)

    def of_product(w):
        return loss(x @ w)

    w = torch.randn(6, 6, device=device, dtype=x.dtype)
    for transformed, point in (
        (grad(loss), x),
        (grad(of_product), w),
        (grad(lambda x: grad(loss)(x).square().sum()), x),
        (vmap(grad(lambda x: loss(x.expand(len(target), -1)))), x),
        (lambda x: torch.func.jvp(loss, (x,), (torch.ones_like(x),)), x),
    ):
        found = torch.compile(transformed, backend="aot_eager", fullgraph=True)(point)
        torch.testing.assert_close(found, transformed(point))
    assert grad(loss)(x).count_nonzero() > 0
