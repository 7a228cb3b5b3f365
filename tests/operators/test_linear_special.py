"""Linear cross entropy where numbers are not ordinary: as cross_entropy of the product, in every format."""

import pytest
import torch
import torch.nn.functional as F
from helpers.float16_problems import NEGATIVE_WEIGHTS, PROBLEMS
from helpers.heads import random_head

import xent_ops
from xent_ops.testing import assert_linear, linear_oracle

INF, NAN = float("inf"), float("nan")
WAYS = [{"reduction": r, "chunk_rows": c} for r in ("mean", "sum", "none") for c in (None, 2)]


def inputs(device, dtype=torch.float64, classes=9):
    """(input, linear_weight, target, linear_bias)."""
    x, head, bias, _ = random_head(device, dtype, (6,), classes, 5, requires_grad=False)
    return x, head, torch.tensor([3, 8, -100, 0, 7, 7], device=device), bias


def both(x, head, target, bias, *, upstream=None, **options):
    """[value, gradients of x, head and bias], ours and those of cross_entropy of the product."""
    keywords = {name: value for name, value in options.items() if name not in ("chunk_rows", "accumulate_dtype")}
    results = []
    for unfused in (False, True):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, head, bias)]
        if unfused:
            loss = xent_ops.cross_entropy(F.linear(*leaves), target, dim=-1, **keywords)
        else:
            loss = xent_ops.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], **options)
        grad = torch.ones_like(loss) if upstream is None else torch.full_like(loss, upstream)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves, grad)])
    return results


def assert_same(results, dtype=torch.float64):
    """float16 rounds at other places, the more so the larger the parts of a sum are."""
    tolerance = (
        {} if dtype == torch.float64 else {"rtol": 16 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    )
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, equal_nan=True, **tolerance)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e300], ids=str)
@pytest.mark.parametrize("column", [2, 3], ids=["no target", "a target"])
def test_biases_that_are_no_numbers(device, options, value, column):
    """-inf is a class that is masked away: without a gradient."""
    x, head, target, bias = inputs(device)
    bias[column] = value
    results = both(x, head, target, bias, **options)
    assert_same(results)
    if value == -INF and column == 2:
        _, grad_x, grad_head, grad_bias = results[0]
        assert grad_x.isfinite().all() and not grad_head[2].any() and not grad_bias[2].any()
    assert_same(both(x, head, target, bias, label_smoothing=0.1, lse_square_scale=0.1, **options))


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e160], ids=str)
@pytest.mark.parametrize("row", [2, 4], ids=["ignored", "counted"])
def test_rows_of_the_input_that_are_no_numbers(device, options, value, row):
    """An ignored row adds nothing to the loss and has a gradient of zeros; the head's has 0 * NaN, as nn.Linear's."""
    x, head, target, bias = inputs(device)
    x[row] = value
    results = both(x, head, target, bias, **options)
    assert_same(results)
    if row == 2:
        value, grad_x, _, grad_bias = results[0]
        assert value.isfinite().all() and grad_bias.isfinite().all()
        assert grad_x.isfinite().all() and (grad_x[2] == 0).all()


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_huge_logits(device, options):
    x, head, target, bias = inputs(device)
    assert_same(both(x * 1e6, head, target, bias, **options))
    assert_same(both(x * 1e6, head, target, bias, softcap=30.0, **options))


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("upstream", [0.0, -2.0, 1e-300, 1e300])
def test_upstream_gradients(device, options, upstream):
    x, head, target, bias = inputs(device)
    results = both(x, head, target, bias, upstream=upstream, **options)
    assert_same(results)
    if upstream == 0.0:
        assert not any(grad.any() for grad in results[0][1:])
        bias[3] = NAN
        assert_same(both(x, head, target, bias, upstream=upstream, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("upstream", [INF, NAN])
def test_upstream_gradients_that_are_no_numbers(device, options, upstream, dtype):
    """No gradient of a counted row is one, so that a loss scaler sees it."""
    x, head, target, bias = inputs(device, dtype)
    _, grad_x, grad_head, grad_bias = both(x, head, target, bias, upstream=upstream, **options)[0]
    counted = target != -100
    assert not grad_x[counted].isfinite().any()
    assert not grad_head.isfinite().any() and not grad_bias.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "weights",
    [[0.0] * 9, [0.0] * 3 + [1.0] * 6, [1.0] * 3 + [INF] + [1.0] * 5, [1.0] * 8 + [NAN], [-1.0] * 9, [1e-9] * 9],
    ids=["zeros", "some zeros", "inf", "nan", "negative", "tiny"],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_class_weights(device, dtype, weights, smoothing):
    x, head, target, bias = inputs(device, dtype)
    weight = torch.tensor(weights, device=device)
    for options in WAYS:
        assert_same(both(x, head, target, bias, weight=weight, label_smoothing=smoothing, **options), dtype)


@pytest.mark.parametrize("ignored", [-100, -1, 0, 7, 8, 255])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_kinds_of_targets(device, ignored, kind):
    """Also where uint8 would wrap around: 156 is -100 there, and a class here."""
    x, head, target, bias = inputs(device, classes=200)
    if kind == torch.uint8 and ignored < 0:
        target = torch.tensor([156, 3, 155, 199, 0, 156], device=device)
    target = torch.where(target == -100, ignored, target).to(kind)
    for options in WAYS:
        assert_same(both(x, head, target, bias, ignore_index=ignored, lse_square_scale=0.1, **options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "extreme",
    [
        {"label_smoothing": 1.0},
        {"lse_square_scale": 3.0},
        {"softcap": 1e-3},
        {"softcap": 2.0**-126},
        {"softcap": 1e38},
        {"logit_scale": -2.0, "softcap": 0.1, "label_smoothing": 0.3, "lse_square_scale": 1.0},
    ],
    ids=str,
)
def test_extreme_options(device, dtype, extreme):
    x, head, target, bias = inputs(device, dtype)
    for options in WAYS:
        assert_same(both(x, head, target, bias, **extreme, **options), dtype)


def test_second_derivatives_without_features(device):
    x, head, target, bias = inputs(device)
    leaves = [tensor.requires_grad_() for tensor in (x[:, :0], head[:, :0], bias)]
    loss = xent_ops.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2])
    *none, grad_bias = torch.autograd.grad(loss, leaves, create_graph=True)
    assert [grad.shape for grad in none] == [(6, 0), (9, 0)]
    (second,) = torch.autograd.grad(grad_bias.square().sum(), leaves[2])
    wanted = torch.func.grad(
        lambda b: torch.func.grad(lambda b: F.cross_entropy(b.expand(6, 9), target))(b).square().sum()
    )(bias.detach())
    torch.testing.assert_close(second, wanted)


@pytest.mark.parametrize("name", PROBLEMS | NEGATIVE_WEIGHTS)
def test_float16_gradients_of_logits_beyond_it(device, name):
    """Of rows: the backward of reduction="none" makes them for upstream gradients and class weights of about one."""
    x, head, weight, target, upstream, options = (PROBLEMS | NEGATIVE_WEIGHTS)[name].to(device)
    x.requires_grad_(), head.requires_grad_()
    loss = xent_ops.linear_cross_entropy(x, head, target, weight=weight, reduction="none", **options)
    grads = torch.autograd.grad(loss, (x, head), upstream)
    expected = linear_oracle(x, head, target, None, weight, upstream=upstream, reduction="none", **options)
    assert expected.grads[1].abs().max() < torch.finfo(torch.float16).max
    assert_linear(loss, grads, expected)
