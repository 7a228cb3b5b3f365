"""FSDP2 with the head and the loss as one module: how often its weight travels; run by test_data_parallel.py."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data_parallel_cases import ROWS, WIDTH, Block, Model, V, _batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from vocab_parallel_cases import Collectives

import xent_ops


class Tied(nn.Module):
    """Tokens in, loss out; one matrix for the embedding and the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = xent_ops.LinearCrossEntropyLoss(tied_weight=self.embedding.weight)

    def forward(self, ids, target):
        return self.head(self.body(self.embedding(ids)).tanh(), target)


class TiedPlain(Tied):
    def forward(self, ids, target):
        return F.cross_entropy(F.linear(self.body(self.embedding(ids)).tanh(), self.embedding.weight), target)


def _model(make=None):
    torch.manual_seed(0)
    return Model(partial(xent_ops.LinearCrossEntropyLoss, WIDTH, V)) if make is None else make()


def _mesh(device):
    return init_device_mesh(device, (dist.get_world_size(),))


def _travels(seen, shard, world):
    """How often a parameter with so many numbers a rank is gathered and scattered. c10d names the output first."""
    gathers = [name for name, number in seen if "allgather" in name and number == world * shard]
    return len(gathers), len([name for name, number in seen if "scatter" in name and number == shard])


def collectives(device):
    """The weight is gathered once in the root group, or with reshard_after_forward=False; else once each way."""
    world, mesh = dist.get_world_size(), _mesh(device)
    h, target = (tensor[dist.get_rank()] for tensor in _batch(device, [3] * world))
    rows = -(-V // world)  # FSDP pads to as many on every rank
    ways = [  # a group of its own, with which options; how often the weight is gathered
        (False, {}, 1),
        (True, {}, 2),
        (True, {"reshard_after_forward": False}, 1),
    ]
    for own_group, options, gathers in ways:
        model = _model().to(device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        if own_group:
            fully_shard(model.head, mesh=mesh, **options)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            with Collectives() as forward:
                loss = model(h, target)
            with Collectives() as backward:
                loss.backward()
            assert _travels(forward.seen, rows * WIDTH, world) == (1, 0), forward.seen
            assert _travels(backward.seen, rows * WIDTH, world) == (gathers - 1, 1), backward.seen


def accumulation_without_sync(device):
    """Micro-batches that share one divisor: nothing is scattered before the last, and the sum is that of one mean."""
    world, mesh = dist.get_world_size(), _mesh(device)
    batches = [_batch(device, ignored) for ignored in ([3] * world, [7] * world)]
    total = sum(int((target != -100).sum()) for _, target in batches)
    model = _model().to(device)
    model.head.reduction = "sum"
    fully_shard(model, mesh=mesh)
    for number, (h, target) in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        with Collectives() as mode:
            # FSDP averages over ranks.
            model(h[dist.get_rank()], target[dist.get_rank()], divisor=total / world).backward()
        assert any("scatter" in name for name, _ in mode.seen) == (number == len(batches) - 1)
    whole = _model().to(device)
    h, target = (torch.cat([batch[i].flatten(0, 1) for batch in batches]) for i in (0, 1))
    whole(h, target).backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)


def mixed_precision(device):
    """bfloat16 weights in forward and backward, float32 gradients: what one process gets that casts by hand."""
    world, mesh = dist.get_world_size(), _mesh(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    h, target = _batch(device, [3] * world)
    model, plain = _model().to(device), _model().to(device)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    loss = model(h[dist.get_rank()], target[dist.get_rank()])
    assert loss.dtype == torch.float32
    loss.backward()
    low = _model().to(device, torch.bfloat16)
    grads = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    for rank in range(world):
        made = torch.autograd.grad(low(h[rank].bfloat16(), target[rank]), list(low.parameters()))
        for total, grad in zip(grads, made, strict=True):
            total += grad.float() / world
    for parameter, wanted in zip(model.parameters(), grads, strict=True):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted, rtol=1e-5, atol=1e-7)


def tied_embedding(device):
    """One parameter in one group: gathered once, its two gradients added up before they are scattered once."""
    world, rank, mesh = dist.get_world_size(), dist.get_rank(), _mesh(device)
    generator = torch.Generator().manual_seed(2)
    ids, target = (torch.randint(0, V, (world, ROWS), generator=generator).to(device) for _ in range(2))
    model, plain = _model(Tied).to(device), _model(TiedPlain).to(device)
    fully_shard(model, mesh=mesh)
    assert len(list(model.parameters())) == 3
    with Collectives() as mode:
        value = model(ids[rank], target[rank])
        value.backward()
    names = [name for name, _ in mode.seen]
    assert len([name for name in names if "gather" in name]) == 1, names
    assert len([name for name in names if "scatter" in name]) == 1, names
    wanted = plain(ids.flatten(), target.flatten())
    wanted.backward()
    value = value.detach()
    dist.all_reduce(value)
    torch.testing.assert_close(value / world, wanted.detach())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)


def outside_of_its_module(device):
    """There the weight of a head in a group of its own is this rank's part."""
    world, rank, mesh = dist.get_world_size(), dist.get_rank(), _mesh(device)
    h, target = _batch(device, [3] * world)
    model = _model().to(device)
    fully_shard(model.head, mesh=mesh)
    with pytest.raises(TypeError, match=r"With FSDP2 \(fully_shard\).* as xent_ops\.LinearCrossEntropyLoss does"):
        xent_ops.linear_cross_entropy(h[rank], model.head.weight, target[rank])


def _as_one_process(model, whole, loss, h, target):
    """The mean over all rows, and its gradients, of one process."""
    wanted = whole(h.flatten(0, 1), target.flatten())
    wanted.backward()
    loss.backward()
    value = loss.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    dist.all_reduce(value)
    torch.testing.assert_close(value / dist.get_world_size(), wanted.detach())
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)


def hybrid_sharding(device):
    """HSDP: sharded in groups of half the ranks, the same in both groups."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    h, target = _batch(device, [3] * world)
    model = _model().to(device)
    for layer in (*model.blocks, model):
        fully_shard(layer, mesh=mesh)
    with Collectives() as forward:
        loss = model(h[rank], target[rank])
    with Collectives() as backward:
        _as_one_process(model, _model().to(device), loss, h, target)
    rows = -(-V // (world // 2))
    assert _travels(forward.seen, rows * WIDTH, world // 2) == (1, 0), forward.seen
    assert _travels(backward.seen, rows * WIDTH, world // 2) == (0, 1), backward.seen


class TensorParallel(nn.Module):
    """The head split over a mesh of tensor parallelism; its input is the same on the ranks of this mesh."""

    def __init__(self, mesh=None):
        super().__init__()
        self.block, self.mesh = Block(), mesh
        self.head = xent_ops.LinearCrossEntropyLoss(WIDTH, 2 * V + 2)

    def forward(self, h, target):
        h = self.block(h)
        if self.mesh is not None:
            h = DTensor.from_local(h, self.mesh, [Replicate()], run_check=False)
        return self.head(h, target)


def tensor_parallel(device):
    """TP + FSDP on a 2-D mesh: rows of the head over one dimension, and these over the other."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    place = mesh["dp"].get_local_rank()
    h, target = _batch(device, [3] * (world // 2))
    torch.manual_seed(0)
    whole = TensorParallel().to(device)
    model = TensorParallel(mesh["tp"]).to(device)
    model.load_state_dict(whole.state_dict())
    split = distribute_tensor(model.head.weight.detach(), mesh["tp"], [Shard(0)])
    model.head.weight = nn.Parameter(split)
    fully_shard(model.block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert model.head.weight.device_mesh.ndim == 2
    with Collectives() as forward:
        loss = model(h[place], target[place])
    assert ("all_gather_into_tensor.default", 3 * ROWS + 5) in forward.seen  # of statistics, not of logits
    _as_one_process(model, whole, loss, h, target)
