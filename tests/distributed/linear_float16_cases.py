"""float16 where some rows weigh a ten-thousandth of others, of a head over ranks; run by test_linear_parallel.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import over_ranks
from vocab_parallel_cases import Collectives

import xent_ops

N, V, H, SCALE = 24, 16000, 32, 65536.0  # the first scale of torch.amp.GradScaler


def weighted(ranks, x, w, target, factors, class_weight, **how):
    if not ranks:
        return xent_ops.linear_cross_entropy(x, w, target, token_weight=factors, weight=class_weight, **how)
    return over_ranks.linear_cross_entropy(x, w, target, token_weight=factors, weight=class_weight, **how)


def tokens(ranks, x, w, target, factors, class_weight, **how):
    function = over_ranks.linear_token_loss if ranks else xent_ops.linear_token_loss
    return function(x, w, target, lambda stats, factors: -factors * stats.log_probs, rows=(factors,), **how)


def distilled(ranks, x, w, target, factors, class_weight, **how):
    function = over_ranks.linear_distillation_loss if ranks else xent_ops.linear_distillation_loss
    return function(x, w, x.detach().flip(-1), w.detach() / 2, target=target, token_weight=factors, **how)


def rows_that_weigh_little(device):
    """Each row of the input's gradient by itself, and the gradient of this rank's classes."""
    world, rank, generator = dist.get_world_size(), dist.get_rank(), torch.Generator().manual_seed(0)
    x = torch.randn(N, H, generator=generator).half().to(device)
    w = (torch.randn(V, H, generator=generator) / 8 + torch.randn(H, generator=generator) / 4).half().to(device)
    target = torch.randint(V, (N,), generator=generator).to(device)
    factors = torch.logspace(-4, 0, N, device=device)[torch.randperm(N, generator=generator)]
    weight = torch.ones(V, device=device).index_copy(0, target, factors)
    shard = slice(rank * V // world, (rank + 1) * V // world)
    calls = [
        (weighted, factors, None, {}),
        (weighted, factors, None, {"batch_invariant": True}),
        (weighted, None, weight, {"chunk_rows": 6}),
        (weighted, factors.sqrt(), weight.sqrt(), {"reduction": "sum", "divisor": 8.0, "label_smoothing": 1e-3}),
        (weighted, factors, None, {"lse_square_scale": 1e-2, "chunk_rows": 6}),
        (tokens, factors, None, {}),
        (distilled, factors, None, {"chunk_rows": 6}),
    ]
    for function, token_weight, class_weight, how in calls:
        exact = x.double().requires_grad_(), w.double().requires_grad_()
        total = function(False, *exact, target, token_weight, class_weight, **how)
        wanted = [grad * SCALE for grad in torch.autograd.grad(total, exact)]
        for sequence_parallel in (False, True):
            part = x.chunk(world)[rank] if sequence_parallel else x
            of_input = wanted[0].chunk(world)[rank] if sequence_parallel else wanted[0]
            mine = part.clone().requires_grad_(), w[shard].clone().requires_grad_()
            own_weight = None if class_weight is None else class_weight[shard]
            own = {"num_classes": V, "class_start": shard.start, "sequence_parallel": sequence_parallel, **how}
            loss = function(True, *mine, target, token_weight, own_weight, **own)
            grads = torch.autograd.grad(loss, mine, torch.tensor(SCALE, device=device))
            off = (grads[0] - of_input).norm(dim=1) / of_input.norm(dim=1)
            assert (off < 1e-2).all(), (function.__name__, how, sequence_parallel, off)
            assert (
                F.mse_loss(grads[1].double(), wanted[1][shard]).sqrt() < 1e-2 * wanted[1][shard].square().mean().sqrt()
            )


def no_collective_more(device):
    """Only float16 with class weights sums them over the ranks."""
    for dtype, weighted_classes, number in (
        (torch.bfloat16, True, 0),
        (torch.float16, False, 0),
        (torch.float16, True, 1),
    ):
        x = torch.randn(N, H, device=device).to(dtype).requires_grad_()
        w = torch.randn(100, H, device=device).to(dtype).requires_grad_()
        dist.broadcast(x.data, 0)
        how = {"weight": torch.rand(100, device=device)} if weighted_classes else {}
        with Collectives() as mode:
            over_ranks.linear_cross_entropy(
                x, w, torch.arange(N, device=device), num_classes=100 * dist.get_world_size(), reduction="sum", **how
            )
        assert mode.seen.count(("all_reduce_.default", N + 1)) == number, mode.seen
