"""The bits of exact numbers (helpers/exact_numbers.py): with chunks of any size, and where ignored rows are left out.

Of products of 16-bit and of 8-bit numbers.
"""

import itertools

import pytest
import torch
from helpers.exact_numbers import DIVISOR, ROWS, exact_fp8_problem, exact_problem

import xent_ops
from xent_ops.head import fp8

CHUNKS = [1, 2, 5, 8, 20, ROWS, None]


def problem(device, dtype, numbers=exact_problem):
    (x, head, target), wanted = numbers(dtype)
    tensors = x.to(device).requires_grad_(), head.to(device).requires_grad_(), target.to(device)
    return tensors, [exact.to(device) for exact in wanted]


def token_loss(x, head, target, **options):
    return xent_ops.linear_token_loss(x, head, target, lambda rows: -rows.log_probs, reduction="sum", **options)


def summed(x, head, target, **options):
    return xent_ops.linear_cross_entropy(x, head, target, reduction="sum", **options)


def of_rows(x, head, target, divisor, **options):
    return xent_ops.linear_cross_entropy(x, head, target, reduction="none", **options).sum() / divisor


@pytest.mark.parametrize("skip_ignored", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("chunk_rows", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [summed, of_rows, token_loss], ids=lambda f: f.__name__)
def test_gradients(device, function, dtype, chunk_rows, skip_ignored):
    """The bits of float64's, with chunks of any size."""
    (x, head, target), wanted = problem(device, dtype)
    loss = function(x, head, target, divisor=DIVISOR, chunk_rows=chunk_rows, skip_ignored=skip_ignored)
    for found, exact in zip(torch.autograd.grad(loss, (x, head)), wanted, strict=True):
        assert torch.equal(found, exact)


@pytest.mark.parametrize("block_bytes", [None, 8 * 32], ids=["", "blocks"])
@pytest.mark.parametrize("skip_ignored", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("products", ["fp8", "fp8_gradients"])
@pytest.mark.parametrize("function", [summed, token_loss], ids=lambda f: f.__name__)
def test_gradients_of_8_bit_products(device, function, products, skip_ignored, block_bytes, monkeypatch):
    """The bits of float64's, with chunks of any size, of all rows at once and by blocks of eight.

    A product is rounded to float32 when it is multiplied by 1/448, and to bfloat16 when it is stored, which is exact
    again. Blocks that are added in float32, as those of float16 are, keep the error of the former: what they add up to
    may be 1e-9 for 0.
    """
    if device == "cuda" and (why := fp8.why_not(torch.device(device))):
        pytest.skip(why)
    if block_bytes is not None:
        monkeypatch.setattr(fp8, "_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(fp8, "_PART_BYTES", block_bytes)
    dtypes = [torch.bfloat16] if block_bytes is not None else [torch.bfloat16, torch.float16]
    for dtype, chunk_rows in itertools.product(dtypes, (1, 5, None)):
        (x, head, target), wanted = problem(device, dtype, exact_fp8_problem)
        options = {"products": products, "chunk_rows": chunk_rows, "skip_ignored": skip_ignored}
        loss = function(x, head, target, divisor=DIVISOR, **options)
        for found, exact in zip(torch.autograd.grad(loss, (x, head)), wanted, strict=True):
            assert torch.equal(found, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_losses_of_rows(device, dtype):
    """And log-probabilities, with chunks of any size: those of one product."""
    (x, head, target), _ = problem(device, dtype)
    with torch.no_grad():
        losses, log_probs = [], []
        for chunk_rows, skip_ignored in itertools.product(CHUNKS, (False, True)):
            options = {"chunk_rows": chunk_rows, "skip_ignored": skip_ignored}
            losses.append(xent_ops.linear_cross_entropy(x, head, target, reduction="none", **options))
            log_probs.append(xent_ops.linear_token_log_probs(x, head, target, **options).log_probs)
    counted = target != -100
    classes = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]).log()
    for found in losses:
        assert torch.equal(found, losses[0]) and found[~counted].eq(0).all()
        assert (found[counted].cpu()[:, None] - classes).abs().amin(-1).max() < 1e-5
    assert all(torch.equal(found, log_probs[0]) for found in log_probs)
