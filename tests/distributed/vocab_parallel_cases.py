"""What test_vocab_parallel.py runs on every rank of a group. Expected values come from one process' float64 logits."""

import contextlib
import itertools
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from xent_ops.distributed import vocab_parallel, vocab_parallel_cross_entropy
from xent_ops.testing import assert_grad, assert_loss, oracle, realistic_logits

V = 203
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.125},
    "z-loss": {"lse_square_scale": 1e-2},
    "all": {"label_smoothing": 0.25, "softcap": 30.0, "logit_scale": 0.75, "lse_square_scale": 1e-2},
}


class Collectives(TorchDispatchMode):
    """Every collective that passes the dispatcher, with the number of elements that a rank gives."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and not func.__name__.startswith(("wait", "_wrap")):
            self.seen.append((func.__name__, args[0].numel() if isinstance(args[0], torch.Tensor) else None))
        return func(*args, **(kwargs or {}))


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
    for reduction, name, w in itertools.product(("none", "sum", "mean"), OPTIONS, (None, weight)):
        one(device, logits, target, w, kind, reduction, **OPTIONS[name])
    one(device, logits, target.clamp(min=0).to(torch.int32), weight, kind, "mean", ignore_index=0)


def values_on_the_ordinary_path(device, kind, dtype):
    """Through the operators and autograd, as modes and tracers get it."""
    undisturbed, vocab_parallel.undisturbed = vocab_parallel.undisturbed, lambda *args, **options: False
    ready, vocab_parallel.ready = vocab_parallel.ready, lambda *args: None
    try:
        values(device, kind, dtype)
    finally:
        vocab_parallel.undisturbed, vocab_parallel.ready = undisturbed, ready


def one_node(device):
    """Of autograd in eager; backward twice; what a graph of the backward is for is refused, without a deadlock."""
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
    with Collectives():
        watched = vocab_parallel_cross_entropy(x, target, num_classes=V)
    assert "Div" in type(watched.grad_fn).__name__
    torch.testing.assert_close(torch.autograd.grad(watched, x)[0], grad)


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


def bad_input(device):
    """What a rank can see alone is an error before it communicates: no rank waits."""
    x, target = torch.randn(4, V, device=device), torch.tensor([1, 2, 3, 4], device=device)
    _, size, _ = split("chunk", V)
    bad = [
        (x, {}, ValueError, f"the shard has {V} columns, which is the whole vocabulary of num_classes={V}"),
        (x[:, : size - 1], {}, ValueError, f"has {size - 1} columns; .* DTensor's chunk rule gives it {size} "),
        (
            x[:, :size],
            {"class_start": V},
            ValueError,
            f"class_start={V} with {size} columns lies beyond num_classes={V}",
        ),
        (x[:, :size], {"class_start": -1}, ValueError, "class_start=-1"),
        (x[:, :size], {"num_classes": 0}, ValueError, "num_classes must be at least 1"),
        (x[:, :size], {"num_classes": float(V)}, TypeError, f"num_classes must be an integer, got {V}.0"),
        (x[:, :size], {"class_start": 0.5}, TypeError, "class_start must be an integer, got 0.5"),
        (x[:, :size], {"num_classes": 2**63, "class_start": 0}, ValueError, "num_classes must fit into 64 bits"),
        (x[:3, :size], {}, ValueError, r"target has shape \(4,\)"),
        (x[:, :size], {"reduction": "avg"}, ValueError, "'avg' is not a valid value for reduction"),
        (x[:, :size], {"weight": x[0]}, ValueError, r"weight has shape \(203,\)"),
        (x[:, :size], {"weight": x[0, :size].clone().requires_grad_()}, RuntimeError, "weight requires grad"),
        (x[:, :size], {"lse_square_scale": float("inf")}, ValueError, "lse_square_scale must be finite"),
        (x[:, :size], {"lse_square_scale": 1e39}, ValueError, "lse_square_scale must be at most"),
        (x[:, :size], {"logit_scale": 1e39}, ValueError, "logit_scale must be at most"),
        (x[:, :size], {"ignore_index": -100.0}, TypeError, "ignore_index must be an integer, got -100.0"),
        (x[:, :size], {"num_classes": True}, TypeError, "num_classes must be an integer, got True"),
        (
            x[:, :size],
            {"softcap": torch.ones((), requires_grad=True)},
            RuntimeError,
            "softcap is a tensor that requires",
        ),
        (x[:, :size].tolist(), {}, TypeError, "logits_shard must be a torch.Tensor, got list"),
        (x[:, :size].long(), {}, TypeError, "logits has dtype torch.int64"),
    ]
    with Collectives() as mode:
        for logits, keywords, error, text in bad:
            with pytest.raises(error, match=text):
                vocab_parallel_cross_entropy(logits, target, **{"num_classes": V, **keywords})
        wrong = target.clone()
        wrong[2] = V
        if device == "cpu":
            with pytest.raises(IndexError, match=f"target {V} is out of bounds: valid are 0 to {V - 1}"):
                vocab_parallel_cross_entropy(x[:, :size], wrong, num_classes=V)
    assert mode.seen == []
    if device == "cuda":
        loss = vocab_parallel_cross_entropy(x[:, :size], wrong, num_classes=V, reduction="none")
        assert loss.isnan().tolist() == [False, False, True, False]


def shards_that_do_not_tile(device):
    """NaN everywhere; the same with check=True is an error everywhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    target = torch.tensor([1, 2, 3, 4], device=device)
    size = V // world

    def loss(start, width, **keywords):
        x = torch.randn(4, width, device=device, requires_grad=True)
        value = vocab_parallel_cross_entropy(x, target, num_classes=V, class_start=start, **keywords)
        (grad,) = torch.autograd.grad(value, x)
        return value, grad

    cases = [
        ("an overlap", 0, size),
        ("an overlap", 0, V),
        ("the shards end at|a gap", rank * size, size - 1),
        ("an overlap|a gap", rank * (size - 1), size),
        ("a gap", rank * size + 1, size - (rank == world - 1)),
    ]
    for text, start, width in cases:
        value, grad = loss(start, width)
        assert value.isnan() and grad.isnan().all()
        with pytest.raises(ValueError, match=text):
            loss(start, width, check=True)


def check_across_ranks(device):
    rank = dist.get_rank()
    target = torch.tensor([1, 2, 3, -100], device=device)
    start, size, _ = split("chunk", V)
    x = torch.randn(4, size, device=device, requires_grad=True)

    def call(logits=x, labels=target, **keywords):
        return vocab_parallel_cross_entropy(logits, labels, **{"num_classes": V, "check": True, **keywords})

    torch.testing.assert_close(call(), call(check=False), rtol=0, atol=0)
    call(class_start=start)
    other = target.clone()
    other[1] = 50
    wrong = target.clone()
    wrong[3] = V
    last = dist.get_world_size() - 1
    odd = rank == last  # the rank that differs
    bad = [
        (
            {"labels": other if odd else target},
            f"targets differ between ranks: row 1 is 2 on rank 0 but 50 on rank {last}",
        ),
        (
            {"logits": x[:3], "labels": target[:3]} if odd else {},
            r"target shape is \(4,\) on rank 0 but \(3,\) on rank",
        ),
        ({"label_smoothing": 0.1 if odd else 0.2}, "label_smoothing is 0.2 on rank 0 but 0.1"),
        ({"reduction": "sum" if odd else "mean"}, "reduction is mean on rank 0 but sum"),
        ({"ignore_index": -1 if odd else -100}, f"rank {last}: IndexError: target -100 is out of bounds"),
        ({"weight": torch.ones(size, device=device) if odd else None}, "class weights is False on rank 0 but True"),
        ({"num_classes": V + 1 if odd else V, "class_start": start}, f"num_classes is {V} on rank 0 but {V + 1}"),
        ({"labels": wrong if odd else target}, f"rank {last}: IndexError: target {V} is out of bounds"),
        ({"logits": x[:, 1:] if odd else x}, f"rank {last}: ValueError: the shard of rank {last} has"),
        ({"logits": x.double() if odd else x}, "accumulation in is float32 on rank 0 but float64"),
    ]
    for keywords, text in bad:
        with pytest.raises(ValueError, match=text):
            call(**keywords)


def check_raises_on_every_rank(device):
    """What one rank refuses by itself, all of them raise: none waits for it."""
    last = dist.get_world_size() - 1
    odd = dist.get_rank() == last  # the rank that is wrong
    start, size, _ = split("chunk", V)
    x = torch.randn(4, size, device=device)
    target = torch.tensor([1, 2, 3, -100], device=device)
    weight = torch.ones(size, device=device)

    def call(logits=x, labels=target, **keywords):
        return vocab_parallel_cross_entropy(logits, labels, **{"num_classes": V, "check": True, **keywords})

    def as_dtensor(tensor):
        from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    def tracked(tensor):
        return tensor.clone().requires_grad_() if odd else tensor

    # (keywords of a right call, those that are wrong on one rank, what every rank says)
    bad = [
        ({}, {"num_classes": float(V)}, f"TypeError: num_classes must be an integer, got {V}.0"),
        ({}, {"num_classes": None}, "TypeError: num_classes must be an integer, got None"),
        ({}, {"num_classes": 0}, "ValueError: num_classes must be at least 1"),
        ({"class_start": start}, {"class_start": 0.5}, "TypeError: class_start must be an integer, got 0.5"),
        ({"class_start": start}, {"class_start": -1}, "ValueError: class_start=-1"),
        ({}, {"class_start": V}, f"ValueError: class_start={V}"),
        ({"weight": weight}, {"weight": tracked(weight)}, "RuntimeError: weight requires grad"),
        ({"weight": weight}, {"weight": weight[1:]}, "ValueError: weight has shape"),
        ({"weight": weight}, {"weight": weight.tolist()}, "TypeError: weight must be a torch.Tensor, got list"),
        ({}, {"ignore_index": -100.0}, "TypeError: ignore_index must be an integer, got -100.0"),
        ({}, {"ignore_index": True}, "TypeError: ignore_index must be an integer, got True"),
        ({}, {"softcap": 0.0}, "ValueError: softcap must be a finite number above 0"),
        ({}, {"softcap": "30"}, "TypeError: softcap must be a number, got '30'"),
        ({}, {"logit_scale": tracked(torch.ones(()))}, "RuntimeError: logit_scale is a tensor that requires grad"),
        ({}, {"logit_scale": 1e39}, "ValueError: logit_scale must be at most"),
        ({}, {"label_smoothing": 2.0}, "ValueError: label_smoothing must be between"),
        ({}, {"lse_square_scale": 1e39}, "ValueError: lse_square_scale must be at most"),
        ({}, {"reduction": "avg"}, "ValueError: 'avg' is not a valid value for reduction"),
        ({}, {"labels": target.float()}, "TypeError: target has dtype torch.float32"),
        ({}, {"labels": None}, "TypeError: target must be a torch.Tensor, got None"),
        ({}, {"logits": x.tolist()}, "TypeError: logits_shard must be a torch.Tensor, got list"),
        ({}, {"logits": x[0, 0]}, "ValueError: logits_shard has no dimension"),
        ({}, {"logits": x.to_sparse()}, "TypeError: logits_shard has layout torch.sparse_coo"),
        ({}, {"logits": as_dtensor(x)}, "TypeError: logits_shard is a DTensor: pass logits_shard.to_local()"),
        ({}, {"logits": x[:, :-1]}, "ValueError: the shard of rank"),
        ({}, {"logits": x.long()}, "TypeError: logits has dtype torch.int64"),
    ]
    for right, wrong, text in bad:
        with pytest.raises(ValueError, match=f"^vocab_parallel_cross_entropy: rank {last}: {re.escape(text)}"):
            call(**{**right, **(wrong if odd else {})})

    text = f"rank {last}: NotImplementedError: .*vocab_parallel_cross_entropy below a functorch transform"
    for transform in (torch.func.grad, torch.vmap, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        function = transform(call) if odd else call
        with pytest.raises(ValueError, match=text):
            function(x)
    with (
        torch.autograd.forward_ad.dual_level() if odd else contextlib.nullcontext(),
        pytest.raises(ValueError, match=text),
    ):
        call()
    # The group is as it was.
    value = call(ignore_index=np.int64(-100), label_smoothing=1, softcap=torch.tensor(30.0))
    torch.testing.assert_close(value, call(check=False, label_smoothing=1.0, softcap=30.0))


def check_of_numbers_of_other_types(device):
    """Options that are equal are no difference between ranks."""
    odd = dist.get_rank() == 0
    _, size, _ = split("chunk", V)
    x, target = torch.randn(4, size, device=device), torch.tensor([1, 2, 3, -100], device=device)
    value = vocab_parallel_cross_entropy(
        x,
        target,
        num_classes=np.int64(V) if odd else V,
        ignore_index=torch.tensor(-100) if odd else -100,
        softcap=30 if odd else 30.0,
        logit_scale=torch.tensor(0.5) if odd else 0.5,
        check=True,
    )
    same_bits_everywhere(value)


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
