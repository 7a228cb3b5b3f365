"""Linear cross entropy against the float64 oracle: every kernel, float16 scales, divisors, many rows. Options: tests/fuzz."""

import pytest
import torch
import torch.nn.functional as F
from helpers.heads import random_head

import xent_ops
from xent_ops.head.packing import ComputedRows
from xent_ops.head.products import Products
from xent_ops.kernels.options import Chunking
from xent_ops.testing import assert_linear, linear_oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FULL = {"label_smoothing": 0.25, "softcap": 4.0, "logit_scale": -0.75, "lse_square_scale": 0.0625}


def problem(rows, features, classes, dtype, device="cpu", seed=0):
    """(input, linear_weight, target, linear_bias, class weight); every fourth row is ignored."""
    numbers = {"seed": seed, "scale": max(features, 1) ** -0.5, "ignored": slice(3, None, 4), "requires_grad": False}
    x, head, bias, target = random_head(device, dtype, (rows,), classes, features, **numbers)
    weight = torch.rand(classes, generator=torch.Generator().manual_seed(seed)) + 0.1
    return x, head, target, bias, weight.to(device)


def check(x, head, target, bias=None, weight=None, *, upstream=None, divisor=None, twice=False, **options):
    """Loss and gradients, a second backward too, against the oracle. Returns them."""
    tensors = [tensor.detach().requires_grad_() for tensor in (x, head, bias) if tensor is not None]
    bias = None if bias is None else tensors[2]
    loss = xent_ops.linear_cross_entropy(
        *tensors[:2], target, linear_bias=bias, weight=weight, divisor=divisor, **options
    )
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    assert loss.dtype == accumulator
    if upstream is None:
        upstream = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1)).to(loss)
    expected = linear_oracle(
        x, head, target, bias, weight, upstream=upstream, divisor=1.0 if divisor is None else divisor, **options
    )
    for _ in range(1 + twice):
        grads = torch.autograd.grad(loss, tensors, upstream.to(loss), retain_graph=True)
        for grad, tensor in zip(grads, tensors, strict=True):
            assert grad.dtype == tensor.dtype and grad.shape == tensor.shape and grad.is_contiguous()
        assert_linear(loss, grads, expected)
    return loss.detach(), grads


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.usefixtures("new_memory_is_nan")
def test_no_product_depends_on_what_memory_held(device):
    """On CPUs with AMX those of bfloat16 multiply what is behind a row of logits by zero (oneDNN issue 5717)."""
    x, head, target, bias, weight = problem(290, 33, 131, torch.bfloat16, device)
    check(x, head, target, bias, weight, chunk_rows=48)
    for _, logits in Products(ComputedRows(target), x, head, bias, Chunking(48), (True, True, True)).chunks():
        rows, (pitch, _) = len(logits), logits.stride()
        assert pitch == 192 and logits.isfinite().all()
        assert device != "cpu" or (logits.as_strided((rows, 5), (pitch, 1), 131) == 0).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel(device, dtype, reduction):
    """Rows of a chunk that end at odd places, in each device's kernels."""
    check(*problem(10, 8, 37, dtype, device), reduction=reduction, chunk_rows=4, twice=True, **FULL)


def test_the_budget_tells_one_rounding_from_one_a_chunk():
    """bfloat16 sums of many chunks are out of the budget of float32 sums."""
    x, head, target, _, _ = problem(2000, 16, 40, torch.bfloat16)
    target[:] = 7  # so that one row of the gradient grows with every chunk
    x = x.abs()
    loss, grads = check(x, head, target, chunk_rows=8)
    expected = linear_oracle(x, head, target, upstream=1.0, chunk_rows=8, accumulate_dtype=torch.float32)
    head_ = head.clone().requires_grad_()
    xent_ops.linear_cross_entropy(x, head_, target, chunk_rows=8).backward()
    with pytest.raises(AssertionError, match=r"grad_linear_weight: .* out of budget"):
        assert_linear(loss, (grads[0] * 0 + expected.grads[0], head_.grad), expected)
    head_.grad = None
    xent_ops.linear_cross_entropy(x, head_, target, chunk_rows=8, accumulate_dtype=torch.float32).backward()
    assert_linear(loss, (None, head_.grad), expected)


def test_the_budget_sees_a_wrong_gradient():
    x, head, target, bias, weight = problem(60, 16, 40, torch.bfloat16)
    expected = linear_oracle(x, head, target, bias, weight)
    grads = [grad.clone() for grad in expected.grads]
    assert_linear(expected.value, grads, expected)
    for i, name in enumerate(("grad_input", "grad_linear_weight", "grad_linear_bias")):
        wrong = list(grads)
        wrong[i] = wrong[i] * 1.1
        with pytest.raises(AssertionError, match=rf"{name}: .* out of budget"):
            assert_linear(expected.value, wrong, expected)
    with pytest.raises(AssertionError, match="value: "):
        assert_linear(expected.value * 1.02, grads, expected)
    assert (expected.grads[0][3] == 0).all() and (expected.grad_bounds[0][3] < 1e-30).all(), "an ignored row"


# float16 and the number of rows


@pytest.mark.parametrize("upstream", [1.0, 2.0**16])
@pytest.mark.parametrize("way", ["mean", "divisor", "rows"])
def test_float16_is_never_divided_by_the_number_of_rows(device, way, upstream):
    """By 2^40, so that any gradient of a logit would be zero; the scaler's factor comes with the backward."""
    x, head, target, bias, _ = problem(64, 16, 50, torch.float16, device)
    count = 2.0**40
    if way == "mean":
        # A mean over rows of which each weighs 2^-40 of the largest: the same, without 2^40 rows.
        weight = torch.full((50,), 2.0**-40, device=device)
        check(x, head, target, bias, weight, upstream=torch.tensor(upstream))
        return
    tensors = [tensor.clone().requires_grad_() for tensor in (x, head, bias)]
    if way == "divisor":
        loss = xent_ops.linear_cross_entropy(
            *tensors[:2], target, linear_bias=tensors[2], reduction="sum", divisor=count
        )
    else:
        loss = xent_ops.linear_cross_entropy(*tensors[:2], target, linear_bias=tensors[2], reduction="none").sum()
        loss = loss / count
    # As a scaler would have it that knows no bounds, so that float16 holds the result.
    grads = torch.autograd.grad(loss, tensors, torch.tensor(upstream * 2.0**30, device=device))
    expected = linear_oracle(
        x, head, target, bias, upstream=torch.tensor(upstream * 2.0**30), reduction="sum", divisor=count
    )
    assert all(
        grad.count_nonzero() > 0.9 * wanted.count_nonzero() for grad, wanted in zip(grads, expected.grads, strict=True)
    )
    assert_linear(loss, grads, expected)


@pytest.mark.parametrize("weight", [1e-9, 1e30])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_with_class_weights_beyond_it(device, weight, reduction):
    """They cancel in a mean, and may be made up for by the upstream gradient."""
    x, head, target, bias, _ = problem(64, 16, 50, torch.float16, device)
    weights = torch.full((50,), weight, device=device) * torch.arange(1, 51, device=device)
    for smoothing in (0.0, 0.25):
        upstream = torch.tensor(1.0) if reduction == "mean" else torch.rand(64, device=device) / weight
        _, grads = check(
            x, head, target, bias, weights, upstream=upstream, reduction=reduction, label_smoothing=smoothing
        )
        assert all(grad.isfinite().all() and grad.count_nonzero() > grad.numel() / 2 for grad in grads)


@pytest.mark.parametrize("way", ["one pass", "rows", "shard", "pipeline"])
@pytest.mark.parametrize(("dtype", "rows", "chunks"), [(torch.bfloat16, 257, 6), (torch.float16, 4098, 3)], ids=str)
def test_the_gradient_of_the_bias_is_added_up_in_float32(device, dtype, rows, chunks, way):
    """Each row adds 1/2. The sum of a chunk has one digit more than the dtype, and that of all chunks fewer."""
    x, head = torch.zeros(chunks * rows, 1, dtype=dtype, device=device), torch.zeros(2, 1, dtype=dtype, device=device)
    target, bias, ops = torch.zeros(chunks * rows, dtype=torch.int64, device=device), head[:, 0], torch.ops.xent
    ones, how = torch.ones(chunks * rows, device=device), {"chunk_rows": rows}
    if way == "one pass":
        made = ops.linear_cross_entropy_with_grad(x, head, target, bias, reduction="sum", **how)[-1]
        assert made.dtype == torch.float32
    elif way == "pipeline":
        made, none = torch.empty(2, device=device), head.new_empty(0)
        gradient = torch.tensor([-0.5, 0.5], dtype=dtype, device=device).repeat(rows, 32)  # padded to 128 bytes
        for i in range(chunks):
            ops.linear_cross_entropy_chunk_add_(none, made, gradient, x[:rows], 2, i == 0)
    else:
        lse = ops.linear_cross_entropy_forward(x, head, target, bias)[1]
        if way == "rows":
            made = ops.linear_cross_entropy_backward(ones, None, x, head, target, lse, bias, **how)[2]
        else:
            of_slice = (None, None, None, None, None, 0, 2)
            made = ops.linear_cross_entropy_backward(ones, None, x, head, target, lse, bias, *of_slice, **how)[2]
    total = torch.tensor([-0.5, 0.5], device=device) * chunks * rows
    assert torch.equal(made, total.to(made.dtype))
    assert not torch.equal(total.to(dtype), chunks * (total / chunks).to(dtype)), "such a sum would be right too"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_divisors_that_are_no_numbers_of_rows(device, dtype):
    """A tensor is not read. As a division of the sum: nothing for infinity; for 0 what a mean's class weights give."""
    x, head, target, _, _ = problem(12, 5, 9, dtype, device)
    x.requires_grad_(), head.requires_grad_()
    for value in (float("inf"), -3.0, 0.0):
        divisor = torch.tensor(value, device=device)
        results = []
        for unfused in (False, True):
            if unfused:
                loss = xent_ops.cross_entropy(F.linear(x, head), target, reduction="sum") / divisor
            else:
                loss = xent_ops.linear_cross_entropy(x, head, target, reduction="sum", divisor=divisor)
            results.append((loss, *torch.autograd.grad(loss, (x, head))))
        tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
        for mine, wanted in zip(*results, strict=True):
            if divisor == 0.0:
                assert not mine.isfinite().any() or mine.dim() == 2
                assert mine.isfinite().all(-1).sum() == wanted.isfinite().all(-1).sum()
            else:
                torch.testing.assert_close(mine, wanted, **tolerance)


# Shapes and strides


def test_more_rows_than_65536(device):
    x, head, target, bias, weight = problem(70001, 4, 5, torch.float32, device)
    check(x, head, target, bias, weight)
    check(x, head, target, bias, weight, chunk_rows=70001, reduction="none")


def test_inputs_that_share_memory(device):
    w = torch.randn(6, 6, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([0, 1, 2, -100, 4, 5], device=device)
    for reduction in ("mean", "none"):
        mine = xent_ops.linear_cross_entropy(w, w, target, linear_bias=w[0], reduction=reduction).sum()
        wanted = F.cross_entropy(F.linear(w, w, w[0]), target, reduction=reduction).sum()
        torch.testing.assert_close(mine, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(loss, w)[0] for loss in (mine, wanted)))
    storage = torch.randn(60, dtype=torch.float64, device=device)
    overlapping, target = storage.as_strided((12, 5), (3, 1)), torch.arange(12, device=device) % 9
    check(overlapping, storage.as_strided((9, 5), (2, 1)), target, storage[:9], storage[:9].exp(), chunk_rows=5)
