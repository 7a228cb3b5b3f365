"""A function of each token's statistics, of a head over ranks; run on every rank by test_linear_parallel.py."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import over_ranks
from helpers.token_losses import LOSSES, expected, focal, grpo, rows_of
from linear_dtensor_cases import meshes
from linear_log_prob_cases import close, gradients_close
from linear_parallel_cases import H, classes_of, head_of, leaves
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from vocab_parallel_cases import Collectives, V, same_bits_everywhere

import xent_ops

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def one(device, kind, problem, fn, sequence_dim=None, **options):
    input, head, bias, _, target = problem
    rows = rows_of(fn, target.shape, dtype=torch.promote_types(input.dtype, torch.float32))
    x, w, b, labels = leaves(device, *problem, kind=kind, sequence_dim=sequence_dim)
    loss = over_ranks.linear_token_loss(
        x,
        w,
        labels,
        fn,
        rows=tuple(row.to(device) for row in rows),
        linear_bias=b,
        sequence_parallel=sequence_dim is not None,
        **classes_of(kind),
        **{"reduction": "sum", "divisor": 7.0, **options},
    )
    whole = [tensor.double().requires_grad_() for tensor in (input, head, bias)]
    softcap, scale = options.get("softcap"), options.get("logit_scale", 1.0)
    number = int((target != -100).sum()) if options.get("reduction") == "mean" else 7.0
    wanted = expected(fn, F.linear(*whole), target, rows, number, softcap, scale)
    same_bits_everywhere(loss)
    close(loss, wanted.detach(), input.dtype)
    grads = torch.autograd.grad(wanted, whole)
    gradients_close(torch.autograd.grad(loss, (x, w, b)), grads, kind, input.dtype, sequence_dim)


def values(device, kind):
    for dtype in DTYPES:
        for options in ({}, {"softcap": 30.0, "logit_scale": 0.75, "chunk_rows": 4}):
            one(device, kind, head_of(dtype), grpo, **options)
    for fn in LOSSES.values():
        one(device, kind, head_of(torch.float32), fn, chunk_rows=3)
    one(device, kind, head_of(torch.float32), grpo, skip_ignored=True)
    world = dist.get_world_size()
    for shape, dim in (((3, 2 * world), 1), ((2 * world, 3), 0)):
        one(device, kind, head_of(torch.float32, shape), grpo, sequence_dim=dim, chunk_rows=5)
    one(device, kind, head_of(torch.float32), grpo, reduction="mean", divisor=None)


def of_dtensors(device):
    """Rows, classes and both sharded: the numbers of one process, gradients placed as their tensors are."""
    input, head, bias, _, target = head_of(torch.float32, (7, 3))
    rows = rows_of(grpo, target.shape)
    whole = [tensor.double().requires_grad_() for tensor in (input, head, bias)]
    ways = [{"chunk_rows": 5}, {"skip_ignored": True, "reduction": "sum", "divisor": 3.0}]
    results = []
    for number in (int((target != -100).sum()), 3.0):
        wanted = expected(grpo, F.linear(*whole), target, rows, number)
        results.append((wanted, torch.autograd.grad(wanted, whole)))
    for mesh, cases in meshes(device):
        for (of_input, of_head), (how, (wanted, wanted_grads)) in itertools.product(
            cases, list(zip(ways, results, strict=True))
        ):
            split = [isinstance(placement, Shard) for placement in of_head]
            of_rows = [Replicate() if s else p for p, s in zip(of_input, split, strict=True)]
            x = distribute_tensor(input.to(device), mesh, of_input).requires_grad_()
            m, b = (distribute_tensor(t.to(device), mesh, of_head).requires_grad_() for t in (head, bias))
            given = (distribute_tensor(rows[0].to(device), mesh, of_rows), rows[1].to(device))
            loss = xent_ops.linear_token_loss(
                x, m, target.to(device), grpo, rows=given, linear_bias=b, check=True, **how
            )
            assert loss.placements == (Replicate(),) * mesh.ndim
            with pytest.raises(RuntimeError, match="fn returned a tensor that needs no grad"):
                xent_ops.linear_token_loss(x, m, target.to(device), lambda stats: stats.lse.detach(), **how)
            if device == "cpu":
                with pytest.raises(IndexError, match=f"target {V} is out of bounds"):
                    xent_ops.linear_token_loss(x, m, torch.full_like(target, V), lambda stats: stats.entropy, **how)
            close(loss.full_tensor(), wanted.detach(), torch.float32)
            for grad, part, owner in zip(torch.autograd.grad(loss, (x, m, b)), wanted_grads, (x, m, b), strict=True):
                assert grad.placements == owner.placements
                close(grad.full_tensor(), part, torch.float32)


def behaviour(device):
    """One gather a chunk, of 3 numbers a row without entropies; compiled; what ranks must agree on."""
    x, w, b, target = leaves(device, *head_of(torch.float32, (6,)))
    rows = rows_of(grpo, (6,), device)

    def step(x, w, b, fn=focal, **options):
        return over_ranks.linear_token_loss(x, w, target, fn, num_classes=V, linear_bias=b, reduction="sum", **options)

    def with_rows(x, w, b):
        return step(x, w, b, grpo, rows=rows, chunk_rows=3)

    for call, number, chunks in ((step, 3 * 6 + 5, 1), (with_rows, 4 * 3 + 5, 2)):
        with Collectives() as mode:
            loss = call(x, w, b)
        gathers = [("all_gather_into_tensor.default", number)] * chunks
        assert sorted(mode.seen) == sorted([*gathers, *[("all_reduce_.default", 6 // chunks * H)] * chunks])
        with Collectives() as mode:
            grads = torch.autograd.grad(loss, (x, w, b))
        assert mode.seen == []
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(x, w, b)
        torch.testing.assert_close(compiled, loss)
        torch.testing.assert_close(torch.autograd.grad(compiled, (x, w, b)), grads)
    with torch.no_grad():
        torch.testing.assert_close(with_rows(x, w, b), loss.detach())
    torch.testing.assert_close(step(x, w, b, grpo, rows=rows, check=True, check_fn=True), loss)
    with pytest.raises(ValueError, match="it must not mix tokens"):
        step(x, w, b, lambda stats: stats.lse - stats.lse.mean(), check_fn=True)
    with pytest.raises(RuntimeError, match="fn returned a tensor that needs no grad"), Collectives() as mode:
        step(x, w, b, lambda stats: stats.lse.detach())
    assert mode.seen == []
    if device == "cpu":
        bad = target.clone()
        bad[-1] = V
        for fn in (focal, lambda stats: stats.entropy):  # with entropies no operator reads the targets
            with pytest.raises(IndexError, match=f"target {V} is out of bounds"), Collectives() as mode:
                over_ranks.linear_token_loss(x, w, bad, fn, num_classes=V, linear_bias=b)
            assert mode.seen == []
    last = dist.get_world_size() - 1
    mine = (rows[0], rows[1] + (dist.get_rank() == last))
    with pytest.raises(ValueError, match=rf"rows\[1\] differ between ranks: number 0 is .* on rank {last}"):
        step(x, w, b, grpo, rows=mine, check=True)
    wrong = over_ranks.linear_token_loss(x, w, target, focal, num_classes=V, class_start=0, reduction="sum")
    assert wrong.isnan()
