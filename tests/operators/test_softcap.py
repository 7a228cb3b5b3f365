"""softcap: accuracy near zero and at the cap, saturated and infinite logits, NaN."""

import pytest
import torch
from against_oracle import row_case
from helpers.interpreter import INTERPRETED

import xent_ops
from xent_ops.testing import oracle, realistic_logits

pytestmark = pytest.mark.interpreter


def test_softcap_is_accurate_near_zero_and_far_away(device):
    """tanh by exponentials alone loses digits to cancellation near 0."""
    logits = torch.cat([torch.logspace(-6, 3, 200), -torch.logspace(-6, 3, 200)]).expand(3, -1)
    row_case(device, logits.contiguous(), torch.tensor([0, 100, 399]), softcap=1.5)
    row_case(device, logits.contiguous(), torch.tensor([0, 100, 399]), softcap=50.0)


def test_softcap_of_minus_infinity_is_minus_cap(device):
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    logits[:, 50:] = float("-inf")
    row_case(device, logits, torch.tensor([3, 70]), softcap=10.0)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 64.0, 65.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_softcap_of_16_bit_logits(device, dtype, softcap):
    """Kernels sum e^x relative to nothing there, and neighbours share a reciprocal: saturated ones, infinite ones too."""
    inf = float("inf")
    logits = realistic_logits(8, 300, dtype=torch.float32, std=3 * softcap)
    logits[0] = 6e4  # all at the cap
    logits[1] = -6e4
    logits[2, ::2], logits[2, 1::2] = 6e4, -6e4
    logits[3, ::4], logits[3, 1::4], logits[3, 2::4] = inf, -inf, 0.0
    logits[4] = torch.logspace(-7, 4, 300)
    logits[5] = -logits[4]
    target = torch.tensor([0, 299, 1, 4, 17, 18, 19, 20])
    weight = torch.rand(300, generator=torch.Generator().manual_seed(2))
    for options in ({}, {"label_smoothing": 0.25, "weight": weight}):
        row_case(device, logits.to(dtype), target, softcap=softcap, **options)


@pytest.mark.parametrize("classes", [1, 2, 8])
def test_softcap_keeps_losses_of_certain_rows_positive(device, classes):
    rows = 16 if INTERPRETED else 64
    logits = torch.full((rows, classes), -3e4)
    logits[:, 0] = torch.linspace(-100, 100, rows)
    x, target = logits.bfloat16().to(device), torch.zeros(rows).long().to(device)
    loss, _, _, entropy, _ = torch.ops.xent.cross_entropy_forward(x, target, with_entropy=True, softcap=60.0)
    assert bool((loss >= 0).all()), loss
    assert bool((entropy >= 0).all()), entropy
    halves = ((0, classes // 2), (classes // 2, classes))
    parts = [
        torch.ops.xent.cross_entropy_shard(x[:, start:end], target, start, classes, softcap=60.0)
        for start, end in halves
    ]
    whole = torch.ops.xent.cross_entropy_shard_join(
        x[:, : classes // 2], target, torch.cat(parts), 0, classes, softcap=60.0
    )
    assert bool((whole[0] >= 0).all()), whole[0]
    torch.testing.assert_close(
        loss.cpu().double(),
        oracle(logits.bfloat16(), torch.zeros(rows).long(), softcap=60.0).loss,
        atol=60 * 8e-7,  # numerics.tanh_residual; it is largest at -60
        rtol=1e-5,
    )


def test_softcap_keeps_nan_in_its_row(device):
    logits = realistic_logits(3, 300, dtype=torch.bfloat16)
    logits[1, 7] = float("nan")
    x = logits.to(device).requires_grad_()
    loss = xent_ops.cross_entropy(x, torch.tensor([0, 1, 2], device=device), reduction="none", softcap=30.0)
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False]
    assert x.grad.isnan().any(-1).tolist() == [False, True, False]
    assert bool(x.grad[1].isnan().all())
