"""xent_ops.linear_cross_entropy on DTensors; run on every rank by test_linear_parallel.py."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from linear_parallel_cases import H, head_of, rounded_sum
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from vocab_parallel_cases import OPTIONS, Collectives, V

import xent_ops
from xent_ops.testing import assert_linear, linear_oracle


def meshes(device):
    """(mesh, [(placements of the input, of the head)])."""
    world = dist.get_world_size()
    rows, classes = Shard(0), Shard(0)
    line = [[Replicate()], [rows], [Shard(1)]]
    yield init_device_mesh(device, (world,)), [(x, [w]) for x in line for w in (classes, Replicate())]
    if world == 4:
        both = [
            ([rows, Replicate()], [Replicate(), classes]),  # data and tensor parallel
            ([rows, Shard(1)], [Replicate(), classes]),  # and sequence parallel
            ([Shard(1), rows], [classes, Replicate()]),
            ([rows, rows], [Replicate(), classes]),
            ([Replicate(), Replicate()], [classes, Replicate()]),
        ]
        yield init_device_mesh(device, (2, 2)), both


def placements(device):
    """Rows, classes and both sharded: the numbers of one process, and gradients placed as their tensors are."""
    problem = head_of(torch.float32, (7, 3))
    input, head, bias, weight, target = problem
    for mesh, cases in meshes(device):
        for (of_input, of_head), reduction, (name, w) in itertools.product(
            cases, ("none", "sum", "mean"), [("plain", None), ("all", weight)]
        ):
            options = {"reduction": reduction, "chunk_rows": 5, **OPTIONS[name]}
            divisor = {"divisor": 3.0} if reduction == "sum" else {}
            x = distribute_tensor(input.to(device), mesh, of_input).requires_grad_()
            m = distribute_tensor(head.to(device), mesh, of_head).requires_grad_()
            b = distribute_tensor(bias.to(device), mesh, of_head).requires_grad_()
            loss = xent_ops.linear_cross_entropy(
                x,
                m,
                target.to(device),
                linear_bias=b,
                weight=None if w is None else w.to(device),
                **options,
                **divisor,
            )
            vocabulary = [isinstance(placement, Shard) for placement in of_head]
            rows = tuple(Replicate() if split else p for p, split in zip(of_input, vocabulary, strict=True))
            assert isinstance(loss, DTensor) and loss.dtype == torch.float32
            assert loss.placements == (rows if reduction == "none" else (Replicate(),) * mesh.ndim)
            upstream = torch.tensor(0.75) if reduction != "none" else torch.rand(7, 3, generator=torch.Generator())
            up = distribute_tensor(upstream.to(device), mesh, loss.placements)
            grads = torch.autograd.grad(loss, (x, m, b), up)
            for grad, owner in zip(grads, (x, m, b), strict=True):
                assert grad.placements == owner.placements
            expected = linear_oracle(input, head, target, bias, w, upstream=upstream, **options, **divisor)
            expected = rounded_sum(expected, input, head, bias, mesh.size(), torch.float32)
            expected = expected._replace(grad_bounds=tuple(mesh.size() * bound for bound in expected.grad_bounds))
            assert_linear(loss.full_tensor(), [grad.full_tensor() for grad in grads], expected)


def targets(device):
    """A plain target of all rows or of this rank's, and DTensors."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    input, head, _, _, target = (tensor.to(device) for tensor in head_of(torch.float32, (2 * world, 3)))
    wanted = xent_ops.linear_cross_entropy(input, head, target)
    m = distribute_tensor(head, mesh, [Replicate()])
    x = distribute_tensor(input, mesh, [Shard(0)])
    for label in (
        target,
        target.chunk(world)[dist.get_rank()],
        distribute_tensor(target, mesh, [Shard(0)]),
        distribute_tensor(target, mesh, [Replicate()]),
    ):
        torch.testing.assert_close(xent_ops.linear_cross_entropy(x, m, label).full_tensor(), wanted)


def token_weights(device):
    """Of the head and of given logits; rows, classes and both sharded; weights placed as the target, or plain."""
    input, head, _, weight, target = head_of(torch.float64, (7, 3))
    factors = torch.rand(7, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 0.2
    assert (target == -100).any()
    factors[target == -100] = float("nan")
    for mesh, cases in meshes(device):
        for (of_input, of_head), reduction in itertools.product(cases, ("none", "sum", "mean")):
            x = distribute_tensor(input.to(device), mesh, of_input).requires_grad_()
            m = distribute_tensor(head.to(device), mesh, of_head).requires_grad_()
            split = [isinstance(placement, Shard) for placement in of_head]
            of_rows = [Replicate() if s else p for p, s in zip(of_input, split, strict=True)]
            of_logits = [Shard(2) if s else p for p, s in zip(of_input, split, strict=True)]
            z = distribute_tensor((input @ head.t()).to(device), mesh, of_logits).requires_grad_()
            options = {"reduction": reduction, "lse_square_scale": 0.1, "weight": weight.to(device)}
            plain = [tensor.clone().to(device).requires_grad_() for tensor in (input, head)]
            options["token_weight"] = factors.to(device)
            wanted = xent_ops.linear_cross_entropy(*plain, target.to(device), **options)
            upstream = torch.full_like(wanted, 0.5)
            grads = torch.autograd.grad(wanted, plain, upstream)
            for factor in (factors.to(device), distribute_tensor(factors.to(device), mesh, of_rows)):
                options["token_weight"] = factor
                for loss, leaves in (
                    (xent_ops.linear_cross_entropy(x, m, target.to(device), **options), (x, m)),
                    (xent_ops.cross_entropy(z, target.to(device), dim=-1, **options), (z,)),
                ):
                    torch.testing.assert_close(loss.full_tensor(), wanted)
                    up = distribute_tensor(upstream, mesh, loss.placements)
                    made = [grad.full_tensor() for grad in torch.autograd.grad(loss, leaves, up)]
                    if len(leaves) == 2:
                        torch.testing.assert_close(made, list(grads))
                    else:
                        flat = made[0].flatten(0, 1).t() @ plain[0].flatten(0, 1)
                        torch.testing.assert_close(flat, grads[1])


def what_is_communicated(device):
    """No logits, no weight: statistics, the input and its gradient, and with rows sharded the weight's gradient."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    rows = 6 * world
    input, head, _, _, target = (tensor.to(device) for tensor in head_of(torch.float32, (rows,)))
    stats = ("all_gather_into_tensor.default", 3 * rows + 5)
    width = -(-V // world)
    cases = [
        (Replicate(), Shard(0), [stats], [("all_reduce.default", rows * H)]),
        (
            Shard(0),
            Shard(0),
            [("all_gather_into_tensor.default", 6 * H), stats],
            [("reduce_scatter_tensor.default", rows * H)],
        ),
        (Replicate(), Replicate(), [], []),
        (Shard(0), Replicate(), [("all_reduce.default", 2)], [("all_reduce.default", V * H)]),
    ]
    assert width < V
    for of_input, of_head, forward, backward in cases:
        x = distribute_tensor(input, mesh, [of_input]).requires_grad_()
        m = distribute_tensor(head, mesh, [of_head]).requires_grad_()
        with Collectives() as mode:
            loss = xent_ops.linear_cross_entropy(x, m, target)
        assert mode.seen == forward, mode.seen
        with Collectives() as mode:
            loss.backward()
        assert mode.seen == backward, mode.seen


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)

    def forward(self, h, target):
        hidden = self.norm(h)
        return xent_ops.linear_cross_entropy(hidden, self.head.weight, target, label_smoothing=0.1)


def parallel_styles(device):
    """As users write it: ColwiseParallel splits the head, SequenceParallel leaves its input split; eager, compiled."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    generator = torch.Generator().manual_seed(4)
    h = torch.randn(3, 4 * world, H, generator=generator).to(device)
    target = torch.randint(0, V, (3, 4 * world), generator=generator).to(device)
    torch.manual_seed(0)
    plain = Model().to(device)
    expected = F.cross_entropy(plain.head(plain.norm(h)).flatten(0, 1), target.flatten(), label_smoothing=0.1)
    expected.backward()
    for sequence in (True, False):
        split = Model().to(device)
        split.load_state_dict(plain.state_dict())
        plan = {"head": ColwiseParallel()}
        if sequence:
            plan["norm"] = SequenceParallel()
        parallelize_module(split, mesh, plan)
        x = DTensor.from_local(h.chunk(world, 1)[dist.get_rank()], mesh, [Shard(1)])
        if not sequence:
            for name, parameter in list(split.norm.named_parameters()):
                setattr(split.norm, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
            x = distribute_tensor(h, mesh, [Replicate()])
        torch.compiler.reset()
        for function in (split, torch.compile(split, fullgraph=True, backend="aot_eager", dynamic=False)):
            split.zero_grad()
            loss = function(x, target)
            loss.backward()
            torch.testing.assert_close(loss.full_tensor(), expected)
            for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)


def written_in_place(device):
    """What the backward reads, written after the loss: an error. A pipelined loss has made its gradients by then."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    input, head, bias, _, target = (tensor.to(device) for tensor in head_of(torch.float32, (8,)))
    whole, split = [Replicate()], [Shard(0)]
    for of_input, of_head, index, reduction in itertools.product(
        (whole, split), (whole, split), range(3), ("mean", "none")
    ):
        layouts = zip((input, head, bias), (of_input, of_head, of_head), strict=True)
        leaves = [distribute_tensor(tensor, mesh, layout).requires_grad_() for tensor, layout in layouts]
        x, m, b = (leaf * 1 for leaf in leaves)
        loss = xent_ops.linear_cross_entropy(x, m, target, linear_bias=b, reduction=reduction).sum()
        (before,) = torch.autograd.grad(loss, leaves[0], retain_graph=True)
        with torch.no_grad():
            (x, m, b)[index].mul_(2)
        pipelined = reduction == "mean" and (of_input == whole or of_head == split)
        gathered = index == 0 and of_input == split and of_head == split
        if pipelined or (gathered and mesh.size() > 1):
            (after,) = torch.autograd.grad(loss, leaves[0])
            torch.testing.assert_close(after.full_tensor(), before.full_tensor())
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def refused(device):
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    other = init_device_mesh(device, (1, dist.get_world_size()))
    input, head, bias, weight, target = (tensor.to(device) for tensor in head_of(torch.float32, (6,)))
    whole = [Replicate()]
    x, m = distribute_tensor(input, mesh, whole), distribute_tensor(head, mesh, [Shard(0)])
    b = distribute_tensor(bias, mesh, [Shard(0)])
    bad = [
        ((input, m, target), {}, "input is a plain tensor but another argument a DTensor"),
        ((x, head, target), {}, "linear_weight is a plain tensor but"),
        ((x, m, target), {"linear_bias": bias}, "linear_bias is a plain tensor but"),
        ((input, head, distribute_tensor(target, mesh, whole)), {}, "input is a plain tensor but"),
        ((x, distribute_tensor(head, other, [Replicate(), Shard(0)]), target), {}, "both must be on one mesh"),
        ((x, distribute_tensor(head, mesh, [Shard(1)]), target), {}, r"linear_weight is placed as .* valid are"),
        ((distribute_tensor(input, mesh, [Shard(1)]), m, target), {}, r"input is placed as .* valid are"),
        ((DTensor.from_local(input, mesh, [Partial()]), m, target), {}, r"input is placed as .* valid are"),
        ((x, m, target[:3]), {}, r"target has shape \(3,\); expected \(6,\)"),
        ((x, m, target), {"weight": weight[:3]}, rf"weight has shape \(3,\); expected \({V},\)"),
        ((x, m, target), {"divisor": 2.0}, 'expected reduction="sum"'),
        ((x, m, target), {"chunk_rows": 0}, "chunk_rows must be at least 1"),
        ((x, m, F.one_hot(target.clamp(min=0), V).float()), {}, "class indices as the target"),
        ((x.double(), m, target), {}, "linear_weight has dtype torch.float32 but input torch.float64"),
    ]
    weights = distribute_tensor(weight, mesh, whole)
    with Collectives() as mode:
        for args, keywords, text in bad:
            with pytest.raises((ValueError, TypeError), match=text):
                xent_ops.linear_cross_entropy(*args, **keywords)
        with pytest.raises(TypeError, match="weight is a DTensor but the logits are not"):
            xent_ops.cross_entropy(input @ head.t(), target, weights)
        for function in (xent_ops.linear_cross_entropy_outputs, xent_ops.linear_token_log_probs):
            with pytest.raises(NotImplementedError, match=f"{function.__name__} of DTensors is not supported"):
                function(x, m, target)
    assert mode.seen == []
    x.requires_grad_()
    logits = distribute_tensor(input @ head.t(), mesh, [Shard(0)]).requires_grad_()
    for loss, leaf in (
        (xent_ops.linear_cross_entropy(x, m, target, linear_bias=b), x),
        (xent_ops.cross_entropy(logits, target), logits),
    ):
        with pytest.raises(RuntimeError, match=r"of DTensors, or .* has no second derivative"):
            torch.autograd.grad(loss, leaf, create_graph=True)
