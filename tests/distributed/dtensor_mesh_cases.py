"""DTensors of some of the ranks, of a mesh dimension with one rank, and beside plain tensors or torch.func."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xent_ops

ROWS, V, H = 7, 30, 8


def problem(device):
    generator = torch.Generator().manual_seed(0)
    input, weight = (torch.randn(size, H, generator=generator).to(device) for size in (ROWS, V))
    target = torch.randint(V, (ROWS,), generator=generator).to(device)
    return input, weight, target.masked_fill(target == target[2], -100)


def nll(stats, *rows):
    return -stats.log_probs


def ranks_outside_of_a_mesh(device):
    """They compute nothing, as with DTensor's own operators; the ranks of the mesh get the loss of plain tensors."""
    ranks = list(range(dist.get_world_size() // 2))
    mesh, outside = DeviceMesh(device, ranks), dist.get_rank() not in ranks
    input, weight, target = problem(device)
    plain = input.clone().requires_grad_(), weight.clone().requires_grad_()
    wanted = xent_ops.linear_cross_entropy(*plain, target)
    wanted_grads = torch.autograd.grad(wanted, plain)

    def of_logits(x, w, t):
        logits = distribute_tensor((input @ weight.t()), mesh, x.placements).requires_grad_()
        return xent_ops.cross_entropy(logits, t), (logits,)

    for places, of_classes in ((Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(0))):
        for call in (
            of_logits,
            lambda x, w, t: (xent_ops.linear_cross_entropy(x, w, t), (x, w)),
            lambda x, w, t: (-xent_ops.linear_token_log_probs(x, w, t).log_probs.sum() / (t != -100).sum(), (x, w)),
            lambda x, w, t: (xent_ops.linear_token_loss(x, w, t, nll), (x, w)),
        ):
            x = distribute_tensor(input, mesh, [places]).requires_grad_()
            w = distribute_tensor(weight, mesh, [of_classes]).requires_grad_()
            loss, leaves = call(x, w, target)
            assert isinstance(loss, DTensor) and loss.shape == ()
            grads = torch.autograd.grad(loss, leaves)
            for leaf, grad in zip(leaves, grads, strict=True):
                assert grad.shape == leaf.shape and grad.placements == leaf.placements
            if outside:
                assert loss.to_local() == 0 and all(grad.to_local().numel() == 0 for grad in grads)
                continue
            torch.testing.assert_close(loss.full_tensor(), wanted)
            if call is not of_logits:
                for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
                    torch.testing.assert_close(grad.full_tensor(), wanted_grad)


def dimension_of_one_rank(device):
    """It splits nothing: several classes a row, and two dimensions that split the classes."""
    input, weight, target = problem(device)
    mesh = init_device_mesh(device, (dist.get_world_size(), 1))
    ids = torch.stack([target, target.clamp(min=0)], 1)
    wanted = xent_ops.token_log_probs(input @ weight.t(), ids).log_probs
    logits = distribute_tensor(input @ weight.t(), mesh, [Shard(0), Shard(1)])
    torch.testing.assert_close(xent_ops.token_log_probs(logits, ids).log_probs.full_tensor(), wanted)
    both = distribute_tensor(input @ weight.t(), mesh, [Shard(1), Shard(1)]).requires_grad_()
    loss = xent_ops.cross_entropy(both, target)
    torch.testing.assert_close(loss.full_tensor(), xent_ops.cross_entropy(input @ weight.t(), target))
    assert torch.autograd.grad(loss, both)[0].placements == both.placements
    x, w = (distribute_tensor(one, mesh, [Replicate(), Shard(0)]).requires_grad_() for one in (input, weight))
    found = xent_ops.linear_token_log_probs(x, w, ids).log_probs
    torch.testing.assert_close(found.full_tensor(), wanted)
    assert torch.autograd.grad(found.sum(), w)[0].placements == w.placements


def words(device):
    """Which tensor is a DTensor, and that torch.func takes none."""
    input, weight, target = problem(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    row, labels = (distribute_tensor(one, mesh, [Replicate()]) for one in (torch.ones(ROWS, device=device), target))
    logits = distribute_tensor(input @ weight.t(), mesh, [Shard(0)])
    head = (input, weight)
    for call in (
        lambda: xent_ops.linear_token_loss(*head, target, nll, rows=(row,)),
        lambda: xent_ops.token_loss(logits.full_tensor(), target, nll, rows=(row,)),
        lambda: xent_ops.linear_distillation_token_loss(*head, *head, lambda d, row: d.kl * row, rows=(row,)),
    ):
        with pytest.raises(TypeError, match=r"^rows\[0\] is a DTensor but the input is not: .*rows\[0\].to_local\(\)"):
            call()
    for name, given in (("target", {"target": labels}), ("token_weight", {"target": target, "token_weight": row})):
        with pytest.raises(TypeError, match=f"^{name} is a DTensor but input and linear_weight are not: .*{name}.full"):
            xent_ops.linear_cross_entropy(*head, **given)
    for call in (
        lambda: torch.func.grad(lambda x: xent_ops.cross_entropy(x, target).to_local())(logits),
        lambda: torch.func.grad(lambda x: xent_ops.cross_entropy(x, labels).to_local())(logits),
        lambda: torch.vmap(lambda x: xent_ops.cross_entropy(x, target))(logits[None]),
    ):
        with pytest.raises(
            NotImplementedError, match=r"^a loss of DTensors inside a functorch transform .*autograd.grad"
        ):
            call()
