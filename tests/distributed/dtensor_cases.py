"""xent_ops.cross_entropy on DTensor logits; run on every rank by test_vocab_parallel.py."""

import gc
import itertools
import tempfile
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from vocab_parallel_cases import OPTIONS, Collectives, V, expected_of, hold, shard_of, split

import xent_ops
from xent_ops.testing import assert_grad, realistic_logits


def meshes(device):
    world = dist.get_world_size()
    yield init_device_mesh(device, (world,)), [[Shard(0)], [Shard(-1)], [Shard(1)], [Replicate()]]
    if world == 4:
        both = [[Shard(0), Shard(-1)], [Shard(-1), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(-1)]]
        yield init_device_mesh(device, (2, 2)), both


def placements_of_logits(device):
    """Rows, classes and both sharded: the numbers of one process on the whole logits."""
    logits = realistic_logits(7, 3, V, dtype=torch.float32)
    target = torch.randint(0, V, (7, 3), generator=torch.Generator().manual_seed(1))
    target[0, 0] = -100
    weight = torch.rand(V, generator=torch.Generator().manual_seed(2))
    upstream = torch.rand(7, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for mesh, cases in meshes(device):
        for placements, reduction, (name, w) in itertools.product(
            cases, ("none", "sum", "mean"), [("plain", None), ("all", weight)]
        ):
            x = distribute_tensor(logits.to(device), mesh, placements).requires_grad_()
            whole = target.to(device)
            labels = [whole, distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim)]
            rows = [p if isinstance(p, Shard) and p.dim in (0, 1) else Replicate() for p in placements]
            labels += [distribute_tensor(whole, mesh, rows), distribute_tensor(whole, mesh, rows).to_local()]
            weights = None if w is None else w.to(device)
            expected, oracle = expected_of(logits, target, w, reduction, upstream=upstream, **OPTIONS[name])
            for label in labels:
                loss = xent_ops.cross_entropy(x, label, weights, dim=-1, reduction=reduction, **OPTIONS[name])
                assert isinstance(loss, DTensor) and loss.dtype == torch.float32
                assert loss.placements == tuple(rows if reduction == "none" else [Replicate()] * mesh.ndim)
                hold(loss.full_tensor(), expected, torch.float32, oracle.loss_scale.max() * 400)
                up = distribute_tensor(upstream.float().to(device), mesh, rows) if reduction == "none" else None
                (grad,) = torch.autograd.grad(loss, x, up)
                assert grad.placements == x.placements
                assert_grad(grad.full_tensor(), oracle._replace(grad_scale=4 * oracle.grad_scale))
            if w is not None:
                sharded = distribute_tensor(weights, mesh, [Replicate()] * mesh.ndim)
                again = xent_ops.cross_entropy(x, whole, sharded, dim=-1, reduction=reduction, **OPTIONS[name])
                torch.testing.assert_close(again.full_tensor(), loss.full_tensor())


def one_node(device):
    """Contiguous logits with all rows on every rank: one autograd node, whose gradient is laid out as the logits are."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    logits, target = torch.randn(4, V, device=device), torch.tensor([1, 2, -100, 50], device=device)
    plain = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(plain, target), plain)
    for placement in (Shard(1), Replicate()):
        x = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        loss = xent_ops.cross_entropy(x, target)
        assert [type(node).__name__ for node, _ in loss.grad_fn.next_functions if node] == ["AccumulateGrad"]
        for scale in (1, 2):
            (grad,) = torch.autograd.grad(loss * scale, x, retain_graph=True)
            assert (grad.placements, grad.shape, grad.stride()) == (x.placements, x.shape, x.stride())
            torch.testing.assert_close(grad.full_tensor(), scale * expected)


def groups_made_again(device):
    """After destroy_process_group the plans are those of the new groups, and the old mesh is gone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder, meshes = [tempfile.mkdtemp()], []
    dist.broadcast_object_list(folder)
    logits, target = torch.randn(4, V), torch.tensor([1, 2, -100, 50])
    plain = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(plain, target)
    (grad,) = torch.autograd.grad(expected, plain)
    for again in range(3):
        mesh = init_device_mesh(device, (world,))
        meshes.append(weakref.ref(mesh))
        for dim in (0, 1):
            part = logits.chunk(world)[rank] if dim == 0 else shard_of(logits, split("chunk", V))
            x = DTensor.from_local(
                part.to(device), mesh, [Shard(dim)], shape=logits.shape, stride=logits.stride(), run_check=False
            )
            loss = xent_ops.cross_entropy(x.requires_grad_(), target.to(device))
            torch.testing.assert_close(loss.full_tensor().cpu(), expected.detach())
            torch.testing.assert_close(torch.autograd.grad(loss, x)[0].full_tensor().cpu(), grad)
        del mesh, x, loss
        backend = dist.get_backend()
        dist.destroy_process_group()
        dist.init_process_group(backend, init_method=f"file://{folder[0]}/{again}", rank=rank, world_size=world)
    gc.collect()
    assert meshes[1]() is None  # the first of equal meshes is in DTensor's caches, the last has the plans


def other_layouts(device):
    """Classes in the middle, logits that are not contiguous, upstream gradients that are not on every rank."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    target = torch.randint(0, V, (4, 6), device=device)
    for make in (
        lambda: distribute_tensor(torch.randn(4, V, 6, device=device), mesh, [Shard(1)]),
        lambda: distribute_tensor(torch.randn(4, 6, V, device=device), mesh, [Shard(2)]).transpose(1, 2),
        lambda: distribute_tensor(torch.randn(4, 6, V, device=device).transpose(1, 2), mesh, [Shard(1)]),
    ):
        torch.manual_seed(0)
        x = make().detach().requires_grad_()
        plain = x.detach().full_tensor().requires_grad_()
        loss, expected = xent_ops.cross_entropy(x, target), torch.nn.functional.cross_entropy(plain, target)
        torch.testing.assert_close(loss.full_tensor(), expected)
        (grad,), (oracle,) = torch.autograd.grad(loss, x), torch.autograd.grad(expected, plain)
        torch.testing.assert_close(grad.full_tensor(), oracle)
    up = torch.rand(4, 6, device=device)
    x = distribute_tensor(torch.randn(4, 6, V, device=device), mesh, [Shard(2)]).requires_grad_()
    plain = x.detach().full_tensor().requires_grad_()
    loss = torch.nn.functional.cross_entropy(plain.transpose(1, 2), target, reduction="none")
    (expected,) = torch.autograd.grad(loss, plain, up)
    for factor in (distribute_tensor(up, mesh, [Shard(0)]), DTensor.from_local(up / mesh.size(), mesh, [Partial()])):
        loss = xent_ops.cross_entropy(x, target, dim=-1, reduction="none")
        (grad,) = torch.autograd.grad(loss, x, factor)
        torch.testing.assert_close(grad.full_tensor(), expected)


def refused_in_backward(device):
    """A second derivative, and what the backward reads written in place after the loss."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    logits, target = torch.randn(8, V, device=device), torch.arange(8, device=device)
    for placement in (Shard(1), Shard(0), Replicate()):
        x = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        for reduction in ("mean", "none"):
            loss = xent_ops.cross_entropy(x, target, reduction=reduction).sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            with pytest.raises(
                RuntimeError, match=r"no second derivative.* plain tensors of all classes \(full_tensor\(\)\)"
            ):
                grad.sum().backward()
        of_target = Shard(0) if placement == Shard(0) else Replicate()
        of_weight = Shard(0) if placement == Shard(1) else Replicate()
        for write in (
            lambda y, *_: y.mul_(2),
            lambda y, *_: y.to_local().mul_(2),
            lambda _, labels, __: labels.fill_(0),
            lambda _, __, weight: weight.mul_(2),
        ):
            y, labels = x * 1, distribute_tensor(target.clone(), mesh, [of_target])
            weight = distribute_tensor(torch.ones(V, device=device), mesh, [of_weight])
            loss = xent_ops.cross_entropy(y, labels, weight)
            (before,) = torch.autograd.grad(loss, x, retain_graph=True)
            old = weight.to_local().clone()
            with torch.no_grad():
                write(y, labels, weight)
            if of_weight == Shard(0) and not torch.equal(weight.to_local(), old):  # the loss has gathered them
                (after,) = torch.autograd.grad(loss, x)
                torch.testing.assert_close(after.to_local(), before.to_local())
                continue
            with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                loss.backward()


def loss_without_a_gradient(device):
    """A node behind the loss may have none to hand on: then the logits have none, as with torch's own operators."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    for placement in (Shard(1), Replicate()):  # of sharded rows torch 2.11's from_local raises
        x = distribute_tensor(torch.randn(8, V, device=device), mesh, [placement]).requires_grad_()
        loss = Stop.apply(xent_ops.cross_entropy(x, torch.arange(8, device=device)))
        assert torch.autograd.grad(loss, x, allow_unused=True) == (None,)


def log_probs(device):
    """Log-probabilities, entropies and lse of rows, of classes or both sharded; several classes a row where ranks have
    all of them; in inference mode too."""
    generator = torch.Generator().manual_seed(3)
    logits = realistic_logits(7, 3, V, dtype=torch.float64)
    target = torch.randint(0, V, (7, 3), generator=generator)
    several = torch.randint(0, V, (7, 3, 2), generator=generator)
    target[0, 0] = several[0, 1, 1] = -100
    up = torch.rand(7, 3, generator=generator, dtype=torch.float64)
    for mesh, cases in meshes(device):
        for placements, labels, how in itertools.product(
            cases, (target, several), ({}, {"softcap": 30.0, "logit_scale": 0.5}, {"batch_invariant": True})
        ):
            if labels is several and any(placement.is_shard(2) or placement.is_shard(-1) for placement in placements):
                continue
            plain = logits.to(device).requires_grad_()
            x = distribute_tensor(logits.to(device), mesh, placements).requires_grad_()
            wanted = xent_ops.token_log_probs(plain, labels.to(device), **how)
            found = xent_ops.token_log_probs(x, labels.to(device), **how)
            for mine, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine.full_tensor(), theirs)
            with torch.inference_mode():
                for mine, theirs in zip(xent_ops.token_log_probs(x, labels.to(device), **how), wanted, strict=True):
                    torch.testing.assert_close(mine.full_tensor(), theirs)

            def scalar(values, factor, several=labels is not target):
                log_probs = values.log_probs.sum(-1) if several else values.log_probs
                return ((log_probs - 0.1 * values.entropy + 0.01 * values.lse) * factor).sum()

            rows = found.lse.placements
            (grad,) = torch.autograd.grad(scalar(found, distribute_tensor(up.to(device), mesh, rows)), x)
            (expected,) = torch.autograd.grad(scalar(wanted, up.to(device)), plain)
            assert grad.placements == x.placements
            torch.testing.assert_close(grad.full_tensor(), expected)


def without_gradients(device):
    """A loss in no_grad and in inference mode, where composite operators reach DTensor's dispatch themselves."""
    logits, target = torch.randn(8, V, device=device), torch.arange(8, device=device)
    head = torch.randn(V, 4, device=device)
    for mode in (torch.no_grad, torch.inference_mode):
        for mesh, cases in meshes(device):
            for placements in cases:
                if any(placement.is_shard(1) and len(cases) > 3 for placement in placements):
                    placements = [Shard(-1) if placement.is_shard(1) else placement for placement in placements]
                if placements.count(Shard(-1)) > 1:
                    continue
                of_head = [Shard(0) if placement.is_shard(-1) else Replicate() for placement in placements]
                of_input = [placement if placement.is_shard(0) else Replicate() for placement in placements]
                with mode():
                    x = distribute_tensor(logits, mesh, placements)
                    for reduction in ("mean", "none"):
                        loss = xent_ops.cross_entropy(x, target, reduction=reduction)
                        wanted = xent_ops.cross_entropy(logits, target, reduction=reduction)
                        torch.testing.assert_close(loss.full_tensor(), wanted)
                        hidden = distribute_tensor(logits[:, :4], mesh, of_input)
                        loss = xent_ops.linear_cross_entropy(
                            hidden, distribute_tensor(head, mesh, of_head), target, reduction=reduction
                        )
                        wanted = xent_ops.linear_cross_entropy(logits[:, :4], head, target, reduction=reduction)
                        torch.testing.assert_close(loss.full_tensor(), wanted)


def rows_of_this_rank(device):
    """A plain target of a rank's own rows, whose shape is by chance that of logits without their last dimension."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for width in (4 * mesh.size(), 4 * mesh.size() - 1):  # on one rank alone the second is not what it seems
        logits = torch.randn(2, 4, width, device=device)
        target = torch.randint(0, 4, (2, width), device=device)
        x, labels = (distribute_tensor(whole, mesh, [Shard(whole.dim() - 1)]) for whole in (logits, target))
        loss = xent_ops.cross_entropy(x, labels.to_local())
        torch.testing.assert_close(loss.full_tensor(), torch.nn.functional.cross_entropy(logits, target))


def what_is_communicated(device):
    """Sharded rows: nothing, or a handful of numbers. Sharded classes: 3 numbers a row, and never the logits."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    rows = 12
    logits, target = torch.randn(rows, V, device=device), torch.arange(rows, device=device)
    labels = distribute_tensor(target, mesh, [Shard(0)])
    x = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
    for reduction, numbers in (("none", []), ("sum", [4]), ("mean", [4])):
        with Collectives() as mode:
            loss = xent_ops.cross_entropy(x, labels, reduction=reduction)
            torch.autograd.grad(loss, x, torch.ones_like(loss))
        assert [number for _, number in mode.seen] == numbers, mode.seen
    y = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with Collectives() as mode:
        xent_ops.cross_entropy(y, target).backward()
    assert mode.seen == [("all_gather_into_tensor.default", 3 * rows + 5)]


def colwise_parallel(device):
    """As users write it: the head's weight is split, its output left split, the loss takes it; eager and compiled."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    plain = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, V, bias=False)).to(device)
    split = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, V, bias=False)).to(device)
    split.load_state_dict(plain.state_dict())
    plan = {"1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(split, mesh, plan)
    h = torch.randn(4, 5, 8, device=device)
    target = torch.randint(0, V, (4, 5), device=device)

    def step(model, h, target):
        return xent_ops.cross_entropy(model(h), target, dim=-1, label_smoothing=0.1)

    expected = step(plain, h, target)
    expected.backward()
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        split.zero_grad()
        loss = function(split, h, target)
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
            grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            torch.testing.assert_close(grad, theirs.grad, rtol=1e-4, atol=1e-6)


def refused(device):
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    x = torch.randn(4, V, device=device)
    target = torch.arange(4, device=device)
    partial = DTensor.from_local(x, mesh, [Partial()])
    split = distribute_tensor(x, mesh, [Shard(1)])
    other = init_device_mesh(device, (1, dist.get_world_size()))
    rows = distribute_tensor(torch.randn(8, V, device=device), mesh, [Shard(0)])
    six = distribute_tensor(torch.zeros(6, device=device).long(), mesh, [Shard(0)])
    bad = [
        (rows, six, {}, r"target has shape \(6,\); expected \(8,\)"),  # on every rank, also where its rows would fit
        (partial, target, {}, "valid are Replicate"),
        (split, target, {"inplace_backward": True}, "inplace_backward=True is not supported for DTensor"),
        (split, target, {"grad_in_forward": True}, "grad_in_forward=True is not supported for DTensor"),
        (split, target[:3], {}, r"target has shape \(3,\); expected \(4,\)"),
        (split, target, {"weight": torch.ones(3, device=device)}, rf"weight has shape \(3,\); expected \({V},\)"),
        (split, distribute_tensor(target, other, [Replicate()] * 2), {}, "target lies on .*all must be on one mesh"),
        (split, split.detach(), {}, "class probabilities"),
        (split, target, {"dim": 2}, "dim=2 is not a dimension of input"),
        (split.unsqueeze(0).expand(3, 4, V), torch.zeros(3, 4, device=device).long(), {}, "want dim=-1"),
        (
            x,
            distribute_tensor(target, mesh, [Replicate()]),
            {},
            "target is a DTensor but the logits are not: .*target.full_tensor",
        ),
    ]
    for logits, labels, keywords, text in bad:
        with pytest.raises((ValueError, TypeError), match=text):
            xent_ops.cross_entropy(logits, labels, **keywords)
    with pytest.raises(NotImplementedError, match="cross_entropy_outputs of DTensors is not supported"):
        xent_ops.cross_entropy_outputs(split, target)
    with pytest.raises(NotImplementedError, match=r"xent\.token_logits of DTensors whose classes are split"):
        xent_ops.token_log_probs(split, target.unsqueeze(-1))
    with pytest.raises(NotImplementedError, match=r"xent\.cross_entropy_shard of DTensors is not supported"):
        torch.ops.xent.cross_entropy_shard(split, target, 0, V)
    labels = distribute_tensor(target, mesh, [Replicate()])
    with pytest.raises(NotImplementedError, match=r"xent\.top_k of DTensors is not supported"):
        torch.ops.xent.top_k(x, 2, labels)  # the logits are plain
    with pytest.raises(NotImplementedError, match=r"xent\.cross_entropy_backward_ of DTensors is not supported"):
        torch.ops.xent.cross_entropy_backward_(x.new_ones(4), None, x.clone(), labels, x.logsumexp(-1))
    whole = distribute_tensor(x.new_ones(()), mesh, [Replicate()])
    with pytest.raises(NotImplementedError, match="distillation_loss of DTensors is not supported"):
        xent_ops.distillation_loss(x, x, reduction="sum", divisor=whole)
    with pytest.raises(NotImplementedError, match="linear_top_k of DTensors is not supported"):
        xent_ops.linear_top_k(x, x, 2, linear_bias=labels.float())
    with pytest.raises(TypeError, match="divisor is a DTensor but input and linear_weight are not"):
        xent_ops.linear_cross_entropy(x, x, target, reduction="sum", divisor=whole)
