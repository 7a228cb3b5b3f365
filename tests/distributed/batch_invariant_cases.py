"""batch_invariant=True of a head over ranks; run on every rank by test_linear_parallel.py."""

from unittest import mock

import torch
import torch.distributed as dist
from helpers import over_ranks

from xent_ops import distributed
from xent_ops.kernels import cpu

H, V = 16, 101  # of the shards: V / ranks classes, not equal


def problem(device, number):
    generator = torch.Generator().manual_seed(3)
    head, x = torch.randn(V, H, generator=generator), torch.randn(number, H, generator=generator)
    target = torch.randint(V, (number,), generator=generator)
    target[2::9] = -100
    size = -(-V // dist.get_world_size())
    shard = head[size * dist.get_rank() :][:size]
    return x.bfloat16().to(device), shard.bfloat16().to(device), target.to(device)


def focal(stats):
    return -((1 - stats.log_probs.exp()) ** 2) * stats.log_probs + 0.1 * stats.entropy


def log_probs(x, shard, target, **options):
    stats = over_ranks.linear_token_log_probs(x, shard, target, num_classes=V, batch_invariant=True, **options)
    return *stats, (1.7 * stats.log_probs - 0.3 * stats.entropy).sum()


def rows(x, shard, target, **options):
    loss = over_ranks.linear_cross_entropy(
        x, shard, target, num_classes=V, reduction="none", batch_invariant=True, **options
    )
    return loss, loss.sum()


def summed(x, shard, target, **options):
    return (
        over_ranks.linear_cross_entropy(
            x, shard, target, num_classes=V, reduction="sum", batch_invariant=True, **options
        ),
    )


def weighted(x, shard, target, **options):
    factors = 10.0 ** -(target % 5)
    weight = torch.logspace(-3, 0, len(shard), device=x.device)
    return summed(x, shard, target, token_weight=factors, weight=weight, label_smoothing=0.1, **options)


def tokens(x, shard, target, **options):
    return (
        over_ranks.linear_token_loss(
            x, shard, target, focal, num_classes=V, reduction="sum", batch_invariant=True, **options
        ),
    )


def bits(compute, x, shard, target, **options):
    x = x.detach().requires_grad_()
    *values, total = compute(x, shard, target, **options)
    return [*(value.detach() for value in values), torch.autograd.grad(total, x)[0]]


def own_bits(device):
    x, shard, target = problem(device, 530)
    in_thirds = {"chunk_rows": 96}  # three ranks have equal parts of it, but not of 512 rows
    calls = [(log_probs, {}), (rows, {}), (summed, {}), (tokens, {}), (rows, in_thirds), (summed, in_thirds)]
    in_float16 = [(compute, {}, x.half(), shard.half()) for compute in (log_probs, summed, weighted)]
    for compute, options, x, shard in [*((*call, x, shard) for call in calls), *in_float16]:
        everything = bits(compute, x, shard, target, **options)
        for few in (1, 7, 513):
            some = torch.randperm(530, generator=torch.Generator().manual_seed(few)).to(device)[:few]
            for got, wanted in zip(bits(compute, x[some], shard, target[some], **options), everything, strict=True):
                assert torch.equal(got, wanted[some]), f"{compute.__name__}, {few} rows"


def sequence_parallel(device):
    """Each rank's part of the rows is padded, and values come back in the order of the targets."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x, shard, target = problem(device, 6 * world * 5)
    for compute in (log_probs, rows, summed, tokens):
        options = {} if compute is tokens else {"check": True}
        # By sequences of 5: a rank has 6 tokens of each.
        batch, labels = x.view(5, 6 * world, H), target.view(5, 6 * world)
        mine = batch.chunk(world, 1)[rank].contiguous()
        *values, gradient = bits(compute, mine, shard, labels, sequence_parallel=True, **options)
        *of_two, gradient_of_two = bits(compute, mine[1:3], shard, labels[1:3], sequence_parallel=True)
        assert gradient.shape == mine.shape
        assert torch.equal(gradient[1:3], gradient_of_two), compute.__name__
        for value, few in zip(values, of_two, strict=True):
            assert value.shape == labels.shape and torch.equal(value[1:3], few), compute.__name__
        *replicated, _ = bits(compute, batch, shard, labels)
        for value, other in zip(values, replicated, strict=True):
            torch.testing.assert_close(value, other, rtol=2e-2, atol=2e-2)


def compiled(device, backend):
    """Without graph breaks, the bits of eager."""
    x, shard, target = problem(device, 100)
    for compute, numbers in ((log_probs, (100, 7)), (rows, (7,)), (summed, (7,))):
        in_one_graph = torch.compile(compute, backend=backend, fullgraph=True, dynamic=False)
        for number in numbers:
            eager = bits(compute, x[:number], shard, target[:number])
            for got, wanted in zip(bits(in_one_graph, x[:number], shard, target[:number]), eager, strict=True):
                assert torch.equal(got, wanted), f"{compute.__name__}, {number} rows"


def given_logits(device):
    """In plain torch on a CPU, where a sum of one row is split over threads, and the rows of many are not."""
    columns, world, threads = 100_003, dist.get_world_size(), torch.get_num_threads()
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    logits = torch.randn(9, columns, generator=generator).to(device)
    target = torch.arange(9, device=device) * (world * columns // 9)
    factor = torch.rand(9, generator=torch.Generator().manual_seed(4)).to(device)

    def compute(rows, **options):
        z, options = logits[rows].requires_grad_(), {"reduction": "none", **options}
        if "token_weight" in options:
            options["token_weight"] = factor[rows]
        loss = distributed.vocab_parallel_cross_entropy(
            z, target[rows], num_classes=world * columns, batch_invariant=True, **options
        )
        (gradient,) = torch.autograd.grad(loss.sum(), z)
        return [gradient] if options["reduction"] == "sum" else [gradient, loss.detach()]

    torch.set_num_threads(2)
    with mock.patch.object(cpu, "kernel", lambda name: None):
        for options in ({}, {"token_weight": True}, {"reduction": "sum"}):
            everything = compute(torch.arange(9), **options)
            for some in (torch.tensor([4]), torch.tensor([8, 0, 4])):
                alone = compute(some, **options)
                assert all(torch.equal(got, wanted[some]) for got, wanted in zip(alone, everything, strict=True))
    torch.set_num_threads(threads)
