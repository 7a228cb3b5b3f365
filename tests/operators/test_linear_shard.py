"""The operators of a head that is split over ranks, all ranks in one process: the gather is a cat, the sum a sum."""

import pytest
import torch
from helpers.covering import covering
from helpers.float16_problems import PROBLEMS
from helpers.heads import random_head

from xent_ops.kernels import cpu
from xent_ops.testing import assert_linear, linear_oracle

ops = torch.ops.xent
V, H = 37, 8
INF = float("inf")
SPLITS = {
    "even": [(0, 19), (19, 18)],
    "empty": [(0, 0), (0, 30), (30, 7)],
    "padded": [(0, 25), (25, 25)],
}
FULL = {"label_smoothing": 0.25, "softcap": 30.0, "logit_scale": 0.75}


def problem(device, dtype=torch.float32):
    *head, target = random_head(device, dtype, (2, 5), V, H, scale=0.5, ignored=0, requires_grad=False)
    target[0, 1], target[0, 2] = V - 1, 0
    return *head, torch.rand(V).to(device), target


def shards_of(split, *tensors):
    """For each rank its rows of these tensors, with padding of 7s behind the last."""
    for start, size in SPLITS[split]:
        rows = [None if tensor is None else tensor[start : start + size] for tensor in tensors]
        more = [None if row is None else row.new_full((size - len(row), *row.shape[1:]), 7.0) for row in rows]
        yield start, [None if row is None else torch.cat([row, pad]) for row, pad in zip(rows, more, strict=True)]


def over_ranks(split, input, head, bias, weight, target, upstream, entropy=False, **options):
    """(what the join returns on the first rank, grad_input, grad_head, grad_bias) for upstream gradients of rows."""
    shards = [(start, *rows) for start, rows in shards_of(split, head, bias, weight)]
    stats = [
        ops.linear_cross_entropy_shard(input, h, target, start, V, b, w, entropy, **options)
        for start, h, b, w in shards
    ]
    gathered, results = torch.cat(stats), []
    for start, h, b, w in shards:
        x, h, b = (tensor.clone().requires_grad_() for tensor in (input, h, b))
        outputs = ops.linear_cross_entropy_shard_join(x, h, target, gathered, start, V, b, w, None, entropy, **options)
        values = (outputs[0], outputs[1], outputs[4])[: len(upstream)]
        counted = target != -100
        total = sum((torch.where(counted, v, 0.0) * u).sum() for v, u in zip(values, upstream, strict=True))
        results.append((outputs, torch.autograd.grad(total, (x, h, b))))
    for outputs, _ in results:
        torch.testing.assert_close(outputs, results[0][0], rtol=0, atol=0, equal_nan=True)
    sizes = [max(min(size, V - start), 0) for start, size in SPLITS[split]]
    grads = [grads for _, grads in results]
    for of_rank, size in zip(grads, sizes, strict=True):
        assert of_rank[1][size:].count_nonzero() == of_rank[2][size:].count_nonzero() == 0
    whole = [torch.cat([grad[i][:size] for grad, size in zip(grads, sizes, strict=True)]) for i in (1, 2)]
    return results[0][0], sum(grad[0] for grad in grads), *whole


HOW = [{}, {"chunk_rows": 4}, {"chunk_rows": 4, "skip_ignored": True}]


@pytest.mark.interpreter
@pytest.mark.parametrize("split, options, how, weighted", covering(SPLITS, [{}, FULL], HOW, [False, True]), ids=str)
def test_loss_and_gradients(device, split, options, how, weighted):
    *tensors, weight, target = problem(device)
    upstream = torch.rand(2, 5, generator=torch.Generator().manual_seed(2)).to(device)
    w = weight if weighted else None
    outputs, *grads = over_ranks(split, *tensors, w, target, [upstream], **options, **how)
    expected = linear_oracle(*tensors[:2], target, tensors[2], w, upstream=upstream, reduction="none", **options)
    bounds = expected.grad_bounds
    # The gradient of the input is a sum of rounded parts, which may be larger than it.
    size = expected.grads[0].abs().max() * torch.finfo(torch.float32).eps * 8 * len(SPLITS[split])
    assert_linear(outputs[0], grads, expected._replace(grad_bounds=(bounds[0] + size, *bounds[1:])))
    assert (outputs[1][target == -100] == INF).all() == ("skip_ignored" in how)


@pytest.mark.interpreter
@pytest.mark.parametrize("how", [{}, {"skip_ignored": True}], ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_entropies(device, split, how):
    input, head, bias, _, target = problem(device)
    upstream = [torch.rand(2, 5, generator=torch.Generator().manual_seed(seed)).to(device) for seed in (2, 3, 4)]
    outputs, *grads = over_ranks(split, input, head, bias, None, target, upstream, entropy=True, chunk_rows=4, **how)
    x, h, b = (tensor.double().requires_grad_() for tensor in (input, head, bias))
    log_p, counted = (x @ h.t() + b).log_softmax(-1), target != -100
    lse = (x @ h.t() + b).logsumexp(-1)
    loss = -log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    values = [torch.where(counted, value, 0.0) for value in (loss, lse, entropy)]
    total = sum((value * u).sum() for value, u in zip(values, upstream, strict=True))
    found = [torch.where(counted, value, 0.0).double() for value in (outputs[0], outputs[1], outputs[4])]
    torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-5)
    if how:
        assert (outputs[1][~counted] == INF).all() and not outputs[4][~counted].any()
    wanted = torch.autograd.grad(total, (x, h, b))
    torch.testing.assert_close([grad.double() for grad in grads], list(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_float16_gradients_of_logits_beyond_it(device, name, entropy):
    x, head, weight, target, upstream, options = PROBLEMS[name].to(device)
    if entropy and weight is not None:
        pytest.skip("entropies go with the plain loss")
    bias, upstreams = head.new_zeros(V), [upstream, torch.zeros_like(upstream), torch.zeros_like(upstream)]
    outputs, grad_input, grad_head, _ = over_ranks(
        "even", x, head, bias, weight, target, upstreams if entropy else upstreams[:1], entropy, **options
    )
    expected = linear_oracle(x, head, target, bias, weight, upstream=upstream, reduction="none", **options)
    more = expected.grads[0].abs().max() * torch.finfo(torch.float16).eps * 4  # of a sum of two rounded parts
    bounds = (expected.grad_bounds[0] + more, *expected.grad_bounds[1:])
    assert_linear(outputs[0], (grad_input, grad_head), expected._replace(grad_bounds=bounds))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("of", [1, 2], ids=["lse", "entropy"])
def test_float16_gradients_of_other_outputs_beyond_it(device, of, sign):
    """As those of float32, within float16's roundings of each part."""
    x, head, _, target, _, _ = PROBLEMS["large"].to(device)
    tensors, upstream = (x, head, torch.arange(V, device=device).half() / 16), torch.zeros(3, 2, 5, device=device)
    upstream[of] = sign * 2.0**20
    made = [
        over_ranks("even", *(tensor.to(dtype) for tensor in tensors), None, target, list(upstream), True)[1:3]
        for dtype in (torch.float16, torch.float32)
    ]
    for half, single in zip(*made, strict=True):
        assert (half - single).abs().max() <= 4e-3 * single.abs().max()


@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain torch"])
def test_eight_ranks_in_their_order(device, plain, monkeypatch):
    """The bits of a row's join depend neither on its place nor on the number of rows."""
    if plain:
        monkeypatch.setattr(cpu, "kernel", lambda name: None)
    ranks, size, number = 8, 40, 300
    input, head = torch.randn(number, H, device=device), torch.randn(ranks * size, H, device=device)
    target = torch.randint(ranks * size, (number,), device=device)
    shards = [(head[start:][:size], target, start, ranks * size) for start in range(0, ranks * size, size)]
    stats = torch.cat([ops.linear_cross_entropy_shard(input, *shard, None, None, True) for shard in shards])
    first, header, entropies = stats.split([3 * number, 5, number], 1)

    def join(rows):
        gathered = torch.cat([first.view(ranks, 3, -1)[:, :, rows].flatten(1), header, entropies[:, rows]], 1)
        join_args = (input[rows], head[:size], target[rows], gathered, 0, ranks * size, None, None, None, True)
        return ops.linear_cross_entropy_shard_join(*join_args, in_rank_order=True)[:6]  # without ids

    everything = join(torch.arange(number, device=device))
    for few in (1, 5, 37, number):
        rows = torch.randperm(number, device=device)[:few]
        assert all(torch.equal(got, all_rows[rows]) for got, all_rows in zip(join(rows), everything, strict=True))


def test_a_class_that_wraps_around_to_ignore_index(device):
    """-100 as uint8 is 156."""
    input, head = torch.randn(5, H, device=device), torch.randn(200, H, device=device)
    target, shard = torch.tensor([156, 3, 156, 44, 199], device=device), (0, 200)

    def joined(target, **how):
        gathered = ops.linear_cross_entropy_shard(input, head, target, *shard, **how)
        return ops.linear_cross_entropy_shard_join(input, head, target, gathered, *shard, **how)

    torch.testing.assert_close(joined(target.to(torch.uint8), skip_ignored=True), joined(target))


def test_a_rank_without_classes_beside_one_row_of_several_ids(device):
    """The row has no dimension of its own. Its packed statistics are those of a batch of one."""
    row, head, ids = torch.randn(4).to(device), torch.randn(0, 4).to(device), torch.tensor([1, 6], device=device)
    target = ids[0]
    alone = torch.ops.xent.linear_cross_entropy_shard(row, head, target, 7, 7, ids=ids)
    batch = torch.ops.xent.linear_cross_entropy_shard(row[None], head, target[None], 7, 7, ids=ids[None])
    torch.testing.assert_close(alone, batch)


def test_errors(device):
    """Beside those that follow from the contract."""
    input, head, _, _, target = problem(device)
    x = input[0]
    with pytest.raises(ValueError, match=r"input has shape \(2, 5, 8\); expected \(rows, H\)"):
        ops.linear_logits(input, head)
    logits = ops.linear_logits(x, head)
    assert logits.shape == (5, 64) and logits[:, V:].count_nonzero() == 0
    total, none = torch.empty_like(head), head.new_empty(0)
    with pytest.raises(ValueError, match="which 65 classes do not have"):
        ops.linear_cross_entropy_chunk_add_(total, none, logits, x, 65, True)
    with pytest.raises(ValueError, match="grad_logits has shape"):
        ops.linear_cross_entropy_chunk_add_(total, none, logits[1:], x, V, True)
    with pytest.raises(ValueError, match="grad_linear_weight has shape"):
        ops.attach_gradients(x.new_zeros(()), x, head, None, x, head[1:], none)
    with pytest.raises(ValueError, match=r"logits has shape \(1, 5, 64\); expected \(rows, columns\)"):
        ops.linear_grad_input(logits[None], head)
    gathered = ops.linear_cross_entropy_shard(input, head, target, 0, V)
    with pytest.raises(ValueError, match="needs the group_name"):
        rows, targets = input.unsqueeze(0), target.unsqueeze(0)
        ops.linear_cross_entropy_shard_join(input, head, targets, gathered, 0, V, None, None, rows)
    with pytest.raises(RuntimeError, match="has no derivative"):
        ops.linear_cross_entropy_shard(input.requires_grad_(), head, target, 0, V).sum().backward()
