"""The loss at the end of a pipeline, and of sequences that ranks share; run by test_parallel_trainers.py.

Expected: the step of one process, on all samples.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xent_ops

WIDTH, V, BATCH, LENGTH = 8, 37, 6, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x).tanh()


class LastBlock(Block):
    """With the head, whose gradients are scaled with those of the stage."""

    def __init__(self):
        super().__init__()
        self.head = xent_ops.LinearCrossEntropyLoss(WIDTH, V)


def _model(stages):
    torch.manual_seed(0)
    return [Block() for _ in range(stages - 1)] + [LastBlock()]


def _batch(device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    target = torch.randint(0, V, (BATCH, LENGTH), generator=generator)
    target[1, 3:] = target[4, :2] = -100
    return x.to(device), target.to(device)


def _step_of_one(device, divide):
    """Losses and gradients of all blocks, where the loss of each of three micro-batches is divided like this."""
    blocks = [block.to(device) for block in _model(dist.get_world_size())]
    x, target = _batch(device)
    losses = []
    for hidden, labels in zip(x.chunk(3), target.chunk(3), strict=True):
        for block in blocks:
            hidden = block(hidden)
        losses.append(divide(blocks[-1].head, hidden, labels))
        losses[-1].backward()
    return torch.stack(losses).detach(), [{n: p.grad for n, p in block.named_parameters()} for block in blocks]


def _mean(head, hidden, labels, counted):
    return head(hidden, labels)


def _share(head, hidden, labels, counted):
    return head(hidden, labels, divisor=counted)


def pipeline(device):
    """GPipe and 1F1B: means over micro-batches, and sums by the counted targets of all of them."""
    _pipeline(device, ScheduleGPipe, "mean", _mean, 3)
    _pipeline(device, Schedule1F1B, "sum", _share, 1)


def _pipeline(device, schedule, reduction, loss, divided):
    """``divided``: what the schedule divides gradients by."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x, target = _batch(device)
    counted, last = (target != -100).sum(), rank == world - 1
    module = _model(world)[rank].to(device)
    if last:
        module.head.reduction = reduction
    stage = PipelineStage(module, rank, world, torch.device(device))

    def of_stage(hidden, labels):
        return loss(module.head, hidden, labels, counted)

    run, losses = schedule(stage, 3, loss_fn=of_stage, scale_grads=divided > 1), []
    run.step(*([] if rank else [x]), target=target if last else None, losses=losses)

    def of_one(head, hidden, labels):
        head.reduction = reduction
        return loss(head, hidden, labels, counted) / divided

    expected, gradients = _step_of_one(device, of_one)
    if last:
        torch.testing.assert_close(torch.stack([value.detach() for value in losses]) / divided, expected)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[rank][name])


def context_parallel(device):
    """Each rank has its part of every sequence: DTensors, Shard(1), and plain tensors with a divisor."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device, (world,))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 4 * world, WIDTH, generator=generator).to(device)
    head = torch.randn(V, WIDTH, generator=generator).to(device)
    target = torch.randint(0, V, x.shape[:2], generator=generator).to(device)
    target[0, 2:5] = -100
    leaves = [x.clone().requires_grad_(), head.clone().requires_grad_()]
    expected = xent_ops.linear_cross_entropy(*leaves, target)
    expected.backward()

    hidden = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    weight = distribute_tensor(head, mesh, [Replicate()]).requires_grad_()
    for labels in (target, distribute_tensor(target, mesh, [Shard(1)])):
        loss = xent_ops.linear_cross_entropy(hidden, weight, labels)
        torch.testing.assert_close(loss.full_tensor(), expected.detach())
        of_input, of_weight = torch.autograd.grad(loss, (hidden, weight))
        assert isinstance(of_input, DTensor) and of_input.placements == (Shard(1),)
        torch.testing.assert_close(of_input.full_tensor(), leaves[0].grad)
        torch.testing.assert_close(of_weight.full_tensor(), leaves[1].grad)

    mine, labels = (tensor.chunk(world, 1)[rank].clone() for tensor in (x, target))
    mine, weight = mine.requires_grad_(), head.clone().requires_grad_()
    counted = (labels != -100).sum()
    dist.all_reduce(counted)
    loss = xent_ops.linear_cross_entropy(mine, weight, labels, reduction="sum", divisor=counted)
    loss.backward()
    dist.all_reduce(weight.grad)
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(mine.grad, leaves[0].grad.chunk(world, 1)[rank])
    torch.testing.assert_close(weight.grad, leaves[1].grad)
