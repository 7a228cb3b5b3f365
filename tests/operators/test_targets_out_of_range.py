"""A target out of range where no check reads it: NaN in the loss and the gradient of its row, by every kernel.

That the CPU's operators raise instead is with the tests of each family. Backwards check no target on any device.
"""

import pytest
import torch
from flat_options import FlatOptions
from helpers.covering import covering
from helpers.interpreter import INTERPRETED

from xent_ops.kernels import reference, reference_shard
from xent_ops.testing import realistic_logits

pytestmark = pytest.mark.interpreter
ops = torch.ops.xent

BAD = [-1, "V", 2**32 + 1, -(2**40)]  # 2^32 + 1 would be class 1 if it were cut to 32 bits
if INTERPRETED:
    BAD = BAD[1:3]
ALL = {"label_smoothing": 0.125, "softcap": 16.0, "logit_scale": 0.5}
OPTIONS = pytest.mark.parametrize(("options", "weighted"), [({}, False), (ALL, True)], ids=["plain", "all"])
# Rows and classes: that a tile holds, that a loop reads, that programs share. A GPU gives few rows to several programs.
SHAPES = [(6, 50), (6, 5003), (2, 9001 if INTERPRETED else 30011)]
MANY = [pytest.param((1200, 5003), bad, full, marks=pytest.mark.gpu) for bad in BAD for full in (False, True)]


def problem(device, shape, bad, weighted):
    """(logits, target, weight, row of the bad target)."""
    rows, classes = shape
    logits = realistic_logits(*shape, dtype=torch.float32).to(device)
    target = torch.arange(rows, device=device)
    target[1] = classes if bad == "V" else bad
    return logits, target, torch.rand(classes).to(device) + 0.5 if weighted else None


def assert_nan(values):
    """In row 1, all of it, and nowhere else."""
    values = values.reshape(len(values), -1).isnan()
    assert values[1].all() and not values[[0, *range(2, len(values))]].any()


@pytest.mark.parametrize("shape, bad, full", [*covering(SHAPES, BAD, [False, True]), *MANY], ids=str)
def test_rows(device, kernels, raises_out_of_range, shape, bad, full):
    options = ALL if full else {}
    logits, target, weight = problem(device, shape, bad, weighted=full)
    lse = torch.logsumexp(logits * options.get("logit_scale", 1.0), -1)
    ones, entropy = torch.ones_like(lse), torch.zeros_like(lse)
    assert_nan(kernels.cross_entropy_backward(ones, None, logits, target, lse, weight, **options))
    assert_nan(kernels.cross_entropy_backward(ones, ones, logits, target, lse, weight, None, ones, entropy, **options))
    if kernels is ops and raises_out_of_range:
        return
    for wanted in ((False, False), (True, False), (False, True)):
        loss, lse, argmax, _, _ = kernels.cross_entropy_forward(logits, target, weight, *wanted, **options)
        assert_nan(loss)
        assert lse.isfinite().all()
        if wanted[0]:
            assert torch.equal(argmax, logits.argmax(-1))
    loss, *_, gradient = kernels.cross_entropy_with_grad(logits, target, ones[0], None, weight, **options)
    assert_nan(loss)
    assert_nan(gradient)
    if kernels is ops:
        value, divisor, lse, _ = ops.cross_entropy_reduced(logits, target, weight, reduction="sum", **options)
        assert value.isnan() and divisor.isfinite().all() and lse.isfinite().all()


@OPTIONS
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["operators", "plain torch"])
def test_shards(device, kind, bad, options, weighted):
    """The statistics are plain torch's, for the operator that makes them raises on a CPU."""
    logits, target, weight = problem(device, (6, 50), bad, weighted)
    plain = FlatOptions(reference_shard, cross_entropy_backward=reference.cross_entropy_backward)
    kernels = ops if kind == "operators" else plain
    shards = [(logits[:, :20], 0, 50), (logits[:, 20:], 20, 50)]
    weights = [None, None] if weight is None else [weight[:20], weight[20:]]
    gathered = torch.cat(
        [plain.cross_entropy_shard(x, target, *at, w, **options) for (x, *at), w in zip(shards, weights, strict=True)]
    )
    for (x, *at), w in zip(shards, weights, strict=True):
        loss, lse, _, lse_coefficient, _ = kernels.cross_entropy_shard_join(x, target, gathered, *at, w, **options)
        assert_nan(loss)
        assert lse.isfinite().all()
        more = (w, None, None, None, None if w is None else lse_coefficient, *at)
        assert_nan(kernels.cross_entropy_backward(torch.ones_like(lse), None, x, target, lse, *more, **options))


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("bad", BAD)
def test_a_head_over_ranks(device, bad, entropy):
    logits, target, _ = problem(device, (6, 50), bad, False)
    head, lse = torch.eye(50, device=device), torch.logsumexp(logits, -1)
    ones, zeros = torch.ones_like(lse), torch.zeros_like(lse)
    for shard in (slice(0, 20), slice(20, 50)):
        rows = (logits, head[shard].contiguous(), target, lse, None, None, None)
        of_rows = (zeros if entropy else None, zeros if entropy else None, None)
        grad, of_head, _ = ops.linear_cross_entropy_backward(
            ones, None, *rows, *of_rows, shard.start, 50, [True, True, False]
        )
        assert_nan(grad)
        assert of_head.isnan().all()
