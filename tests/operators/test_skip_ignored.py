"""A linear cross entropy that skips ignored rows gives the same numbers, for any pattern of them."""

import math

import pytest
import torch
from helpers.covering import covering

import xent_ops
from xent_ops.head import packing

ROWS, FEATURES, CLASSES = 300, 40, 1003
PATTERNS = {
    "none": lambda rows: [],
    "all": lambda rows: range(rows),
    "all but one": lambda rows: [row for row in range(rows) if row != rows // 2],
    "every other": lambda rows: range(0, rows, 2),
    "the first": lambda rows: range(rows // 2),
    "the last": lambda rows: range(rows // 3, rows),
}
OPTIONS = {
    "plain": {},
    "all": {"label_smoothing": 0.125, "lse_square_scale": 0.01, "softcap": 20.0, "logit_scale": 0.75},
    "float32": {"accumulate_dtype": torch.float32},
    "float32 logits": {"logits_dtype": torch.float32},
    "divisor": {"reduction": "sum", "divisor": 7.0},
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}  # of a gradient, relative to its norm


def problem(device, dtype, pattern, classes=CLASSES):
    """(input, linear_weight, linear_bias, target): bfloat16 rounds gradients of small logits alike."""
    x, head, bias = torch.randn(ROWS, FEATURES), torch.randn(classes, FEATURES) / 4, torch.randn(classes)
    target = torch.randint(1, classes, (ROWS,))
    target[list(PATTERNS[pattern](ROWS))] = -100
    return *(tensor.to(device, dtype) for tensor in (x, head, bias)), target.to(device)


def run(x, head, bias, target, upstream=None, loss=xent_ops.linear_cross_entropy, **options):
    """The loss and the gradients."""
    inputs = [tensor.clone().requires_grad_() for tensor in (x, head, bias)]
    loss = loss(inputs[0], inputs[1], target, linear_bias=inputs[2], **options)
    return loss.detach(), *torch.autograd.grad(loss, inputs, torch.ones_like(loss) if upstream is None else upstream)


def assert_same(made, wanted, dtype):
    for got, expected in zip(made, wanted, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got.isnan(), expected.isnan())
        got, expected = got.double().nan_to_num(), expected.double().nan_to_num()
        assert (got - expected).norm() <= TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize("dtype, pattern, name", covering(DTYPES, PATTERNS, OPTIONS), ids=str)
def test_reduced(device, dtype, pattern, name):
    *head, target = problem(device, dtype, pattern)
    options = {"chunk_rows": 128, **OPTIONS[name]}
    made = run(*head, target, skip_ignored=True, **options)
    assert_same(made, run(*head, target, **options), dtype)
    again = run(*head, target, skip_ignored=True, **options)
    assert all(torch.equal(*pair) for pair in zip(*[[x.nan_to_num() for x in y] for y in (made, again)], strict=True))
    assert not made[1][target == -100].any() or pattern == "all"  # a mean of nothing is NaN


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(device, dtype, pattern):
    *head, target = problem(device, dtype, pattern)
    upstream = torch.randn(ROWS, device=device)
    options = {"chunk_rows": 100, "reduction": "none", "lse_square_scale": 0.01}
    made = run(*head, target, upstream, skip_ignored=True, **options)
    assert_same(made, run(*head, target, upstream, **options), dtype)
    assert not made[0][target == -100].any() and not made[1][target == -100].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_belongs_to_an_ignored_row(device, dtype):
    """An lse that makes its softmax zero, no entropy, no prediction. Nothing flows back from any of them."""
    x, head, _, target = problem(device, dtype, "every other")
    ignored = target == -100
    plain, skipped = (
        xent_ops.linear_cross_entropy_outputs(x, head, target, lse_square_scale=0.1, skip_ignored=skip)
        for skip in (False, True)
    )
    assert (skipped.lse[ignored] == math.inf).all() and (skipped.predictions[ignored] == -1).all()
    close = {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(skipped.lse[~ignored], plain.lse[~ignored], **close)
    torch.testing.assert_close([*skipped[:2]], [*plain[:2]], **close)
    assert (skipped.accuracy - plain.accuracy).abs() <= 0.01
    assert (skipped.predictions == plain.predictions)[~ignored].float().mean() > 0.98  # bfloat16 rounds to ties

    def log_probs(**how):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, head)]
        made = xent_ops.linear_token_log_probs(*inputs, target, **how)
        total = made.log_probs.sum() + made.entropy[~ignored].sum() + 0.1 * made.lse[~ignored].sum()
        return made, torch.autograd.grad(total, inputs)

    (plain, plain_grads), (skipped, grads) = log_probs(), log_probs(skip_ignored=True)
    assert not skipped.log_probs[ignored].any() and not skipped.entropy[ignored].any()
    torch.testing.assert_close([x[~ignored] for x in skipped], [x[~ignored] for x in plain], **close)
    assert_same(grads, plain_grads, torch.bfloat16 if dtype == torch.float16 else dtype)
    assert not grads[0][ignored].any()
    inputs = [tensor.clone().requires_grad_() for tensor in (x, head)]
    made = xent_ops.linear_token_log_probs(*inputs, target, skip_ignored=True)
    for grad in torch.autograd.grad(made.entropy[ignored].sum() + made.lse[ignored].sum(), inputs):
        assert not grad.any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32], ids=str)
def test_targets_that_wrap_around_to_ignore_index(device, dtype):
    """-100 as uint8 is 156, and 2**32 as int32 is 0: classes all the same."""
    x, head, bias, target = problem(device, torch.float32, "none")
    target = (target % 256).to(dtype)
    target[:2] = torch.tensor([0, 156])
    options = {"reduction": "none", "ignore_index": -100 if dtype == torch.uint8 else 2**32}
    wanted = run(x, head, bias, target.long(), **options)
    assert_same(run(x, head, bias, target, skip_ignored=True, **options), wanted, torch.float32)
    outputs = xent_ops.linear_cross_entropy_outputs(x, head, target, skip_ignored=True, **options)
    assert outputs.lse.isfinite().all() and (outputs.predictions >= 0).all()


def test_second_derivatives(device):
    x, head, _, target = problem(device, torch.float32, "every other", classes=11)

    def second(**options):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, head)]
        loss = xent_ops.linear_cross_entropy(*inputs, target, lse_square_scale=0.1, **options)
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs)

    torch.testing.assert_close(second(skip_ignored=True), second(), rtol=1e-4, atol=1e-6)


def test_compiled_for_any_number_of_rows(device):
    x, head, bias, target = problem(device, torch.float32, "every other")

    step = torch.compile(xent_ops.linear_cross_entropy, fullgraph=True, dynamic=True)

    for rows, pattern in ((ROWS, "every other"), (200, "all but one"), (170, "none")):
        target = target.clone().fill_(3)
        target[list(PATTERNS[pattern](rows))] = -100
        case = x[:rows].clone(), head, bias, target[:rows].clone()
        with torch._dynamo.config.patch(error_on_recompile=rows != ROWS):
            assert_same(run(*case, loss=step, skip_ignored=True), run(*case), torch.float32)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_order_of_the_device(device, pattern):
    """Counted rows in front, all in their order, and how many of them."""
    *_, target = problem(device, torch.float32, pattern)
    rows = packing._on_the_device(target, -100, None)
    assert torch.equal(rows.order, (target == -100).to(torch.uint8).argsort(stable=True))
    assert rows.count == (target != -100).sum()
