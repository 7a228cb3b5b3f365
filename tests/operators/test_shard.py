"""The operators of a vocabulary split over ranks, with all ranks in one process: a cat stands for the all-gather."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from against_oracle import OPTIONS
from flat_options import FlatOptions
from helpers.covering import covering
from helpers.dispatch_log import Log
from helpers.interpreter import INTERPRETED

from xent_ops.kernels import cpu, reference, reference_shard
from xent_ops.testing import assert_grad, assert_loss, assert_lse, oracle, realistic_logits

pytestmark = pytest.mark.interpreter
ops = torch.ops.xent

DTYPES = [torch.float32, torch.bfloat16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float64]
SPLITS = {
    "one": [203],
    "even": [128, 75],
    "aligned": [64, 64, 75],
    "uneven": [1, 150, 52],
    "empty": [100, 0, 103, 0],
    "odd": [67, 1, 2, 133],
}


def shards(logits, sizes, padding=0):
    """(first class, the rank's logits) of every rank; columns of padding behind the last class hold NaN."""
    start = 0
    for size in sizes:
        part = logits[..., start : start + size]
        if padding and size and start + size == logits.shape[-1]:
            part = torch.cat([part, part.new_full((*part.shape[:-1], padding), float("nan"))], -1)
        yield start, part
        start += size


def everyone(logits, target, sizes, weight=None, *, padding=0, order=None, **options):
    """What each rank ends up with: [(leaf, its join's outputs)], in the order of the ranks."""
    classes = logits.shape[-1]
    parts = []
    for start, part in shards(logits, sizes, padding):
        w = None
        if weight is not None:
            w = torch.cat([weight, weight.new_ones(padding)])[start : start + part.shape[-1]]
        parts.append((part.contiguous().requires_grad_(), start, w))
    if order is not None:
        parts = [parts[i] for i in order]
    handed_over = [ops.cross_entropy_shard(x.detach(), target, s, classes, w, **options) for x, s, w in parts]
    gathered = torch.cat(handed_over)
    return [(x, ops.cross_entropy_shard_join(x, target, gathered, s, classes, w, **options)) for x, s, w in parts]


def case(device, logits, target, sizes, weight=None, *, padding=0, upstream=True, **options):
    logits, target = logits.to(device), target.to(device)
    weight = None if weight is None else weight.to(device)
    results = everyone(logits, target, sizes, weight, padding=padding, **options)
    first = results[0][1]
    generator = torch.Generator().manual_seed(7)
    grad_loss, grad_lse = (torch.randn(target.shape, generator=generator).to(first[0]) for _ in range(2))
    outputs, upstreams = (2, (grad_loss, grad_lse)) if upstream else (1, (grad_loss,))
    grads = [torch.autograd.grad(out[:outputs], x, upstreams)[0] for x, out in results]
    for _, out in results:
        assert all(torch.equal(a, b) for a, b in zip(out, first, strict=True)), "ranks disagree"
    grad = torch.cat(grads, -1)
    assert grad.dtype == logits.dtype
    assert grad[..., logits.shape[-1] :].count_nonzero() == 0, "padding got a gradient"
    expected = oracle(logits, target, weight, grad_loss=grad_loss, grad_lse=grad_lse if upstream else 0.0, **options)
    assert_loss(first[0], expected)
    assert_lse(first[1], expected)
    assert_grad(grad[..., : logits.shape[-1]], expected)


@pytest.mark.parametrize("dtype, name, weighted", covering(DTYPES, OPTIONS, [False, True]), ids=str)
def test_options(device, dtype, name, weighted):
    logits = realistic_logits(6, 203, dtype=dtype)
    target = torch.tensor([0, 202, 64, -1, 100, 7])
    weight = torch.rand(203, generator=torch.Generator().manual_seed(2)) if weighted else None
    splits = ["empty"] if INTERPRETED else SPLITS  # seconds each there
    for split, padding in itertools.product(splits, [5] if INTERPRETED else [0, 5]):
        case(device, logits, target, SPLITS[split], weight, padding=padding, ignore_index=-1, **OPTIONS[name])
    if name == "plain" or not INTERPRETED:
        case(device, logits, target, [203], weight, upstream=False, ignore_index=-1, **OPTIONS[name])


def test_wide_shards(device):
    """More than one tile of columns a shard."""
    logits = realistic_logits(3, 9001, dtype=torch.bfloat16)
    weight = torch.rand(9001, generator=torch.Generator().manual_seed(2))
    for options in ({}, {"label_smoothing": 0.125}):
        case(device, logits, torch.tensor([9000, 0, 5000]), [4500, 4501], **options)
        case(device, logits, torch.tensor([9000, 0, 5000]), [8192, 809], weight, padding=7, **options)


def test_views_and_batches(device):
    logits = realistic_logits(4, 5, 101, dtype=torch.float32)
    target = torch.randint(0, 101, (4, 5, 2), generator=torch.Generator().manual_seed(1))
    case(device, logits[:, :-1], target[:, 1:, 1], [50, 51])
    case(device, logits[0, 0], target[0, 0, 0], [50, 51])
    case(device, logits[:0], target[:0, :, 0], [50, 51])


@pytest.mark.parametrize("kernels", ["kernels", "plain torch"])
@pytest.mark.parametrize("columns, padding", [(4000, 3), (4003, 0), (40, 1)])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_batch_invariant(device, dtype, columns, padding, kernels, monkeypatch):
    """A row's statistics alone, beside others, in other places of memory, with and without columns of padding."""
    threads = torch.get_num_threads()
    if INTERPRETED and columns % 8:
        pytest.skip("rows of such a length must start at 128 bytes, and a CPU's memory starts at 64")
    if kernels == "plain torch":
        if device == "cuda" or INTERPRETED:
            pytest.skip("plain torch takes the place of the C++ kernels on a CPU only")
        monkeypatch.setattr(cpu, "kernel", lambda name: None)
        torch.set_num_threads(2)
        columns *= 10  # with so many, torch splits the sum of a single row over threads
    logits = (3 * torch.randn(6, columns + padding)).to(device, dtype)
    target = (torch.arange(6) * (columns + 499) // 5).to(device)

    def statistics(x, t):
        packed = ops.cross_entropy_shard(x, t, 500, 500 + columns, None, True)
        return packed[0, :-5].view(3, -1)

    wanted = statistics(logits, target)
    for rows in ([4], [1, 4, 5]):
        apart = logits[rows]
        places = [F.pad(apart, (left, right))[:, left : left + columns + padding] for left, right in ((1, 0), (3, 5))]
        for other in (apart, *places, logits[rows, :columns], apart.t().contiguous().t()):
            assert torch.equal(statistics(other, target[rows]), wanted[:, rows])
    torch.set_num_threads(threads)


def test_a_large_common_offset_keeps_the_loss(device):
    """lse and target logit near 9000: their difference as float32 numbers would be off by 1e-3."""
    logits = (realistic_logits(4, 500, dtype=torch.float32) + 9000.0).to(device)
    target = torch.tensor([0, 200, 400, 499], device=device)
    for options in ({}, {"label_smoothing": 0.5}):
        (_, out), *_ = everyone(logits, target, [120, 130, 250], **options)
        expected = oracle(logits, target, **options).loss
        torch.testing.assert_close(out[0].cpu().double(), expected, rtol=4e-6, atol=0)


def test_shards_of_very_different_height(device):
    """A shard of -inf, one 1e4 above the other: nothing overflows, nothing is lost."""
    logits = realistic_logits(4, 300, dtype=torch.float32)
    logits[0, :100] = float("-inf")
    logits[1, 100:200] = float("-inf")
    logits[2, :100] += 1e4
    logits[3, :200] -= 1e4
    target = torch.tensor([150, 20, 200, 299])
    case(device, logits, target, [100, 100, 100])
    case(device, logits.clamp(min=-2e4), target, [100, 100, 100], label_smoothing=0.25)


def test_infinite_logits_follow_torch(device):
    inf = float("inf")
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    logits[0, :200] = -inf
    logits[1] = -inf
    logits[2, 5] = inf
    logits[3, 107] = float("nan")
    logits[4, 9] = -inf  # the target itself
    target = torch.tensor([295, 3, 4, 5, 9, 1], device=device)
    for options in ({}, {"label_smoothing": 0.125}):
        results = everyone(logits.to(device), target, [100, 100, 100], **options)
        grad = torch.cat([torch.autograd.grad(out[0].sum(), x)[0] for x, out in results], -1)
        y = logits.to(device).requires_grad_()
        theirs = F.cross_entropy(y, target, reduction="none", **options)
        for _, out in results:
            torch.testing.assert_close(out[0], theirs, equal_nan=True)
        torch.testing.assert_close(grad, torch.autograd.grad(theirs.sum(), y)[0], equal_nan=True)


@pytest.mark.parametrize("weighted", [False] if INTERPRETED else [False, True], ids=str)
def test_shards_that_do_not_tile_give_nan(device, weighted):
    """On every rank, in loss, lse and gradient; whatever the order of ranks, a tiling does not."""
    classes = 60
    logits = realistic_logits(3, classes, dtype=torch.float32).to(device)
    target = torch.tensor([4, 25, 59], device=device)
    weight = torch.rand(classes, device=device) if weighted else None

    def nans(*intervals):
        parts = [(s, logits[:, s:e].contiguous(), None if weight is None else weight[s:e]) for s, e in intervals]
        gathered = torch.cat([ops.cross_entropy_shard(x, target, s, classes, w) for s, x, w in parts])
        found = set()
        for s, x, w in parts:
            x.requires_grad_()
            loss, lse, _, _, _ = ops.cross_entropy_shard_join(x, target, gathered, s, classes, w)
            (grad,) = torch.autograd.grad(loss.sum(), x)
            found |= {loss.isnan().all().item(), lse.isnan().all().item()}
            found |= {loss.isnan().any().item(), lse.isnan().any().item()}
            if x.numel():
                found |= {grad.isnan().all().item(), grad.isnan().any().item()}
        return found

    good = [
        [(0, 60)],
        [(30, 60), (0, 30)],
        [(20, 40), (40, 60), (0, 20)],
        [(0, 30), (30, 30), (30, 60)],
        [(0, 0), (0, 60), (60, 60)],
    ]
    bad = [
        [(0, 60), (0, 60)],  # the whole vocabulary on both
        [(0, 30)],
        [(0, 30), (31, 60)],
        [(0, 31), (30, 60)],
        [(0, 30), (0, 30)],
        [(0, 20), (20, 40), (20, 40)],
        [(0, 20), (0, 20), (40, 60)],
        [(10, 30), (30, 60), (0, 10), (0, 10)],
    ]
    for intervals in good:
        assert nans(*intervals) == {False}, intervals
    for intervals in bad:
        assert nans(*intervals) == {True}, intervals


def test_classes_beyond_what_float32_counts(device):
    """The header keeps a first class of 2^30 + 1 apart from 2^30."""
    start, classes = 2**30 + 1, 2**30 + 5
    x = torch.randn(2, 4, device=device)
    header = ops.cross_entropy_shard(x, torch.full((2,), start, device=device), start, classes)[0, -5:]
    high, low, size_high, size_low, _ = header.tolist()
    assert (high * 2**24 + low, size_high * 2**24 + size_low) == (start, 4)


def test_rows_of_padding_may_hold_anything(device):
    x = torch.randn(4, 100, device=device)
    x[1], x[2] = float("nan"), float("inf")
    target = torch.tensor([3, -100, -100, 4], device=device)
    for leaf, out in everyone(x, target, [50, 50], label_smoothing=0.125):
        (grad,) = torch.autograd.grad(out[0].sum(), leaf)
        assert out[0][1:3].count_nonzero() == 0 and out[2].tolist() == [1, 0, 0, 1]
        assert grad.isfinite().all() and grad[1:3].count_nonzero() == 0


@pytest.mark.parametrize("plain", [False, True], ids=["operators", "plain torch"])
@pytest.mark.parametrize("ignore_index", [-100, 0, 20])
def test_weight_of_an_ignored_class_may_be_infinite(device, plain, ignore_index):
    """One over its number of targets. The second shard has class 20."""
    kernels = FlatOptions(reference_shard, cross_entropy_backward=reference.cross_entropy_backward) if plain else ops
    x = realistic_logits(4, 40, dtype=torch.float32).to(device).requires_grad_()
    target = torch.tensor([3, ignore_index, 39, 4], device=device)
    weight = torch.rand(40, generator=torch.Generator().manual_seed(2)).to(device)
    weight[max(ignore_index, 0)] = float("inf")
    options = {"ignore_index": ignore_index}
    theirs = F.cross_entropy(x, target, weight, reduction="none", **options)
    (wanted,) = torch.autograd.grad(theirs.sum(), x)
    parts = [(half.detach(), start) for half, start in ((x[:, :15], 0), (x[:, 15:], 15))]
    gathered = torch.cat(
        [kernels.cross_entropy_shard(z, target, s, 40, weight[s:][: z.shape[1]], **options) for z, s in parts]
    )
    grads = []
    for z, start in parts:
        w = weight[start:][: z.shape[1]]
        loss, lse, _, lse_coefficient, _ = kernels.cross_entropy_shard_join(
            z, target, gathered, start, 40, w, **options
        )
        torch.testing.assert_close(loss, theirs.detach())
        assert lse_coefficient[1] == 0
        of_slice = (w, None, None, None, lse_coefficient, start, 40)
        grads.append(kernels.cross_entropy_backward(torch.ones_like(loss), None, z, target, lse, *of_slice, **options))
    grad = torch.cat(grads, -1)
    torch.testing.assert_close(grad, wanted)
    assert grad[1].count_nonzero() == 0


def test_plain_torch_reads_no_number_of_an_unbatched_row():
    """Which would synchronise a GPU."""

    x, target, weight = torch.randn(5), torch.tensor(1), torch.ones(5)
    with Log() as log:
        reference_shard.cross_entropy_shard(x, target, 0, 5, weight)
    assert log.seen and "aten._local_scalar_dense.default" not in log.seen


def test_bitwise_the_same_in_every_run_and_order_of_ranks_as_given(device):
    logits = realistic_logits(10, 300, dtype=torch.bfloat16).to(device)
    target = torch.randint(0, 300, (10,), generator=torch.Generator().manual_seed(1)).to(device)
    first, again = (everyone(logits, target, [143, 157], label_smoothing=0.125) for _ in range(2))
    for (_, a), (_, b) in zip(first, again, strict=True):
        assert all(map(torch.equal, a, b))


def test_no_derivative_where_it_would_be_wrong(device):
    x = torch.randn(2, 10, device=device, requires_grad=True)
    target = torch.tensor([1, 2], device=device)
    part = ops.cross_entropy_shard(x, target, 0, 10)
    with pytest.raises(RuntimeError, match="has no derivative: the gradient flows through the logits"):
        part.sum().backward()
    loss, *_ = ops.cross_entropy_shard_join(x, target, part.detach(), 0, 10)
    (grad,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_weight_that_requires_grad_is_refused(device):
    x = torch.randn(2, 10, device=device, requires_grad=True)
    target = torch.tensor([1, 2], device=device)
    weight = torch.rand(10, device=device)
    gathered = ops.cross_entropy_shard(x.detach(), target, 0, 10, weight)
    with pytest.raises(RuntimeError, match="weight requires grad"):
        ops.cross_entropy_shard_join(x, target, gathered, 0, 10, weight.requires_grad_())


def test_a_shard_without_a_share_adds_nothing(device):
    """However far its maximum is from the largest: masked with finfo.min, beside logits whose distance overflows."""
    x = torch.tensor([[torch.finfo(torch.float32).min] * 2 + [1e38, 2.0]], device=device)
    target = torch.tensor([2], device=device)
    for join in (ops.cross_entropy_shard_join, reference_shard.cross_entropy_shard_join):
        gathered = torch.cat([ops.cross_entropy_shard(x[:, s : s + 2], target, s, 4) for s in (0, 2)])
        assert join(x[:, :2], target, gathered, 0, 4)[0].tolist() == [0.0]
