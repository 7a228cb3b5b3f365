"""What test_vocab_parallel.py runs on every rank of a group. Expected values come from one process' float64 logits."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.covering import pairs
from helpers.dispatch_log import Notes
from torch.distributed.tensor import DTensor

from xent_ops.distributed import vocab_parallel_cross_entropy
from xent_ops.ops import transforms
from xent_ops.testing import assert_grad, assert_loss, oracle, realistic_logits

V = 203
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.125},
    "z-loss": {"lse_square_scale": 1e-2},
    "all": {"label_smoothing": 0.25, "softcap": 30.0, "logit_scale": 0.75, "lse_square_scale": 1e-2},
}


class Collectives(Notes):
    """Every collective that passes the dispatcher, with the number of elements that a rank gives."""

    def __init__(self):
        super().__init__(self._one)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # it runs first, and this mode sees what it calls
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def _one(func, args, result):
        if func.namespace not in ("c10d", "_c10d_functional") or func.__name__.startswith(("wait", "_wrap")):
            return []
        return [(func.__name__, args[0].numel() if isinstance(args[0], torch.Tensor) else None)]


def split(kind, classes, group=None):
    """(first class, number of classes, columns of padding) of this rank."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if kind == "chunk":
        size = -(-classes // world)
        start = min(rank * size, classes)
        return start, min(size, classes - start), 0
    if kind == "padded":  # as Megatron pads: all ranks have as many columns, the last one's exceed the vocabulary
        size = -(-classes // world) + 2
        start = rank * size
        return start, min(size, classes - start), max(0, start + size - classes)
    if kind == "uneven":
        ends = [0, *range(7, 7 * world, 7), classes]
        return ends[rank], ends[rank + 1] - ends[rank], 0
    assert kind == "empty"  # the first rank has nothing, the others share
    if rank == 0:
        return 0, 0, 0
    size = -(-classes // (world - 1))
    start = min((rank - 1) * size, classes)
    return start, min(size, classes - start), 0


def shard_of(full, place):
    start, size, padding = place
    part = full[..., start : start + size]
    return (
        torch.cat([part, part.new_full((*part.shape[:-1], padding), 1e3)], -1).contiguous() if padding else part.clone()
    )


def expected_of(logits, target, weight, reduction, lse_square_scale=0.0, ignore_index=-100, upstream=None, **options):
    """(value, Expected with the gradient of the logits) of the reduced loss, in float64."""
    rows = oracle(logits, target, weight, ignore_index=ignore_index, **options)
    target = target.cpu()
    counted = target != ignore_index
    z = lse_square_scale * torch.where(counted, rows.lse, 0).square()
    grad_loss = torch.ones(target.shape, dtype=torch.float64)
    grad_lse = torch.where(counted, 2 * lse_square_scale * rows.lse, 0)
    if reduction == "none":
        value = rows.loss + z
        grad_loss, grad_lse = grad_loss * upstream, grad_lse * upstream
    elif reduction == "sum":
        value = rows.loss.sum() + z.sum()
    else:
        w = torch.ones(logits.shape[-1]) if weight is None else weight.cpu()
        denominator = w.double()[torch.where(counted, target, 0)][counted].sum()
        value = rows.loss.sum() / denominator + z.sum() / counted.sum()
        grad_loss, grad_lse = grad_loss / denominator, grad_lse / counted.sum()
    return value, oracle(
        logits, target, weight, ignore_index=ignore_index, grad_loss=grad_loss, grad_lse=grad_lse, **options
    )


def hold(value, expected, dtype, scale):
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    error = (value.detach().double().cpu() - expected).abs().max()
    assert error <= 32 * eps * scale, f"loss {value} instead of {expected}"


def same_bits_everywhere(value, group=None):
    values = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values, value.detach().contiguous(), group=group)
    assert all(torch.equal(v, values[0]) for v in values), f"ranks disagree: {values}"


def one(device, logits, target, weight, kind, reduction, group=None, function=vocab_parallel_cross_entropy, **options):
    """Loss, bits and gradient of one call on this rank."""
    classes = logits.shape[-1]
    place = split(kind, classes, group)
    x = shard_of(logits, place).to(device).requires_grad_()
    w = None if weight is None else shard_of(weight, place).to(device)
    loss = function(
        x,
        target.to(device),
        group,
        num_classes=classes,
        class_start=None if kind == "chunk" else place[0],
        weight=w,
        reduction=reduction,
        **options,
    )
    upstream = torch.rand(target.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected, rows = expected_of(logits, target, weight, reduction, upstream=upstream, **options)
    hold(loss, expected, logits.dtype, rows.loss_scale.max() * max(1, rows.lse.abs().max()) * max(1, target.numel()))
    same_bits_everywhere(loss, group)
    (grad,) = torch.autograd.grad(loss, x, upstream.to(loss) if reduction == "none" else None)
    start, size, _ = place
    assert grad.dtype == logits.dtype and grad.shape == x.shape
    assert grad[..., size:].count_nonzero() == 0, "padding got a gradient"
    mine = rows._replace(
        grad=rows.grad[..., start : start + size], grad_scale=rows.grad_scale[..., start : start + size]
    )
    if size:
        # 4 times: the divisor, the lse and its square are rounded as well before they meet
        assert_grad(grad[..., :size], mine._replace(grad_scale=4 * mine.grad_scale))


def values(device, kind, dtype):
    logits = realistic_logits(2, 5, V, dtype=dtype)
    target = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(1))
    target[0, 0], target[1, 4], target[1, 2] = -100, V - 1, 0
    weight = torch.rand(V, generator=torch.Generator().manual_seed(2))
    for reduction, name, weighted in pairs(("none", "sum", "mean"), OPTIONS, (False, True)):
        one(device, logits, target, weight if weighted else None, kind, reduction, **OPTIONS[name])
    one(device, logits, target.clamp(min=0).to(torch.int32), weight, kind, "mean", ignore_index=0)


def values_through_the_dispatcher(device, kind, dtype):
    """By the composite of operators that tracers see, with autograd's own formulas."""
    with mock.patch.object(transforms, "is_traced", lambda: True):
        values(device, kind, dtype)


def one_node(device):
    """One autograd node in eager, below a dispatch mode too; backward twice; a second derivative is refused."""
    start, size, _ = split("chunk", V)
    x = realistic_logits(4, V, dtype=torch.float32)[:, start : start + size].to(device).requires_grad_()
    target = torch.tensor([1, 2, -100, 50], device=device)
    loss = vocab_parallel_cross_entropy(x, target, num_classes=V)
    assert [type(node).__name__ for node, _ in loss.grad_fn.next_functions if node] == ["AccumulateGrad"]
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    (again,) = torch.autograd.grad(loss * 2, x, create_graph=True)
    torch.testing.assert_close(again, 2 * grad)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(again.sum(), x)
    with Collectives() as collectives:
        below_a_mode = vocab_parallel_cross_entropy(x, target, num_classes=V)
    assert [name for name, _ in collectives.seen] == ["all_gather_into_tensor.default"]
    torch.testing.assert_close(torch.autograd.grad(below_a_mode, x)[0], grad)


def batch_of_upstream_gradients(device):
    """is_grads_batched: as one after another."""
    start, size, _ = split("chunk", V)
    x = realistic_logits(4, V, dtype=torch.float64)[:, start : start + size].to(device).requires_grad_()
    target = torch.tensor([1, 2, -100, 50], device=device)
    for reduction in ("mean", "none"):
        loss = vocab_parallel_cross_entropy(x, target, num_classes=V, reduction=reduction, lse_square_scale=0.1)
        upstream = torch.randn(3, *loss.shape, device=device, dtype=torch.float64)
        (batched,) = torch.autograd.grad(loss, x, upstream, is_grads_batched=True, retain_graph=True)
        one_by_one = [torch.autograd.grad(loss, x, one, retain_graph=True)[0] for one in upstream]
        torch.testing.assert_close(batched, torch.stack(one_by_one))


def rows_match_the_oracle_closely(device):
    logits = realistic_logits(6, 1003, dtype=torch.float32) + 9000
    target = torch.tensor([0, 1002, 5, 501, 502, 700])
    start, size, _ = split("chunk", 1003)
    x = logits[:, start : start + size].to(device)
    loss = vocab_parallel_cross_entropy(x, target.to(device), num_classes=1003, reduction="none")
    assert_loss(loss, oracle(logits, target))


def integers_of_other_types(device):
    start, size, _ = split("chunk", V)
    x = torch.randn(4, size, device=device, requires_grad=True)
    target = torch.tensor([1, 2, 3, 4], device=device)
    wanted = vocab_parallel_cross_entropy(x, target, num_classes=V)
    for classes, first in ((np.int64(V), np.int32(start)), (torch.tensor(V), torch.tensor(start))):
        found = vocab_parallel_cross_entropy(x, target, num_classes=classes, class_start=first)
        assert torch.equal(found, wanted)


def edge_rows(device):
    """A shard of -inf, all rows ignored, no rows."""
    logits = realistic_logits(4, V, dtype=torch.float32)
    start, size, _ = split("chunk", V)
    x = logits[:, start : start + size].to(device)
    if dist.get_rank() == 0:
        x = torch.full_like(x, float("-inf"))
    logits[:, : split("chunk", V)[1] if dist.get_rank() == 0 else -(-V // dist.get_world_size())] = float("-inf")
    target = torch.tensor([V - 1, V - 2, V - 3, V - 4])
    loss = vocab_parallel_cross_entropy(x, target.to(device), num_classes=V, reduction="none")
    assert_loss(loss, oracle(logits, target))

    x = torch.randn(3, size, device=device, requires_grad=True)
    ignored = torch.full((3,), -100, device=device)
    for rows in (3, 0):
        mean = vocab_parallel_cross_entropy(x[:rows], ignored[:rows], num_classes=V, lse_square_scale=0.1)
        assert mean.isnan()
        (grad,) = torch.autograd.grad(mean, x)
        assert grad.count_nonzero() == 0
        total = vocab_parallel_cross_entropy(x[:rows], ignored[:rows], num_classes=V, reduction="sum")
        assert total == 0
        (grad,) = torch.autograd.grad(total, x)
        assert grad.count_nonzero() == 0


def fewer_classes_than_ranks(device):
    logits = realistic_logits(4, 3, dtype=torch.float32)
    target = torch.tensor([0, 1, 2, -100])
    one(device, logits, target, None, "chunk", "mean", label_smoothing=0.25)
    one(device, logits[:, :1], target.clamp(max=0), None, "chunk", "sum")


def collectives(device):
    """One all-gather of 3 or 4 numbers a row and the headers forward, none backward, and no N x V beside it."""
    rows = 6
    logits, target = realistic_logits(rows, V, dtype=torch.bfloat16), torch.arange(rows)
    start, size, _ = split("chunk", V)
    for weighted, numbers in ((False, 3), (True, 4)):
        x = logits[:, start : start + size].to(device).requires_grad_()
        w = torch.rand(size, device=device) if weighted else None
        with Collectives() as mode:
            loss = vocab_parallel_cross_entropy(
                x, target.to(device), num_classes=V, weight=w, label_smoothing=0.1, lse_square_scale=1e-4
            )
        assert mode.seen == [("all_gather_into_tensor.default", numbers * rows + 5)]
        with Collectives() as mode:
            loss.backward()
        assert mode.seen == []


def groups(device):
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("tp",))
    logits = realistic_logits(4, V, dtype=torch.float32)
    target = torch.tensor([0, 100, 202, 50])
    for group in (None, dist.group.WORLD, mesh.get_group()):
        one(device, logits, target, None, "chunk", "mean", group=group)
    start, size, _ = split("chunk", V)
    x = logits[:, start : start + size].to(device)
    losses = [
        vocab_parallel_cross_entropy(x, target.to(device), group, num_classes=V)
        for group in (None, dist.group.WORLD, mesh, mesh["tp"], mesh.get_group().group_name)
    ]
    assert all(torch.equal(loss, losses[0]) for loss in losses)

    # A part of the ranks, not in the order of their global numbers.
    some = [world - 1, 0]
    part = dist.new_group(some)
    if dist.get_rank() in some:
        one(device, logits, target, None, "chunk", "mean", group=part)
    else:
        with pytest.raises(ValueError, match="not a member of the group"):
            vocab_parallel_cross_entropy(x, target.to(device), part, num_classes=V)
    dist.barrier()
    alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    with Collectives() as mode:
        one_rank = vocab_parallel_cross_entropy(logits.to(device), target.to(device), alone, num_classes=V)
    assert mode.seen == []
    torch.testing.assert_close(one_rank, losses[0])
    if world == 4:
        square = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match="DeviceMesh of 2 dimensions"):
            vocab_parallel_cross_entropy(x, target.to(device), square, num_classes=V)
        one(device, logits, target, None, "chunk", "mean", group=square["tp"].get_group())


def one_rank_holds_every_class(device):
    """Where class_start says so: the others have empty shards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    logits = realistic_logits(4, V, dtype=torch.float32).to(device)
    target = torch.tensor([1, V - 1, 3, -100], device=device)
    for holder in {0, world - 1}:
        columns = V if rank == holder else 0
        for start in (0, V) if rank != holder else (0, 0):
            x = logits[:, :columns].clone().requires_grad_()
            values = [
                vocab_parallel_cross_entropy(x, target, num_classes=V, class_start=start, check=check)
                for check in (False, True)
            ]
            full = logits.clone().requires_grad_()
            wanted = torch.nn.functional.cross_entropy(full, target)
            for value in values:
                same_bits_everywhere(value)
                torch.testing.assert_close(value, wanted)
                (grad,) = torch.autograd.grad(value, x)
                torch.testing.assert_close(grad, torch.autograd.grad(wanted, full, retain_graph=True)[0][:, :columns])
