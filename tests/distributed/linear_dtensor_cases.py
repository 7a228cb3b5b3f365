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


def log_probs(device):
    """Log-probabilities, entropies and lse from hidden states; several classes a row where ranks have all of them."""
    input, head, bias, _, target = head_of(torch.float64, (7, 3))
    several = torch.randint(0, V, (7, 3, 2), generator=torch.Generator().manual_seed(3))
    up = torch.rand(7, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ways = ({}, {"chunk_rows": 5, "batch_invariant": True}, {"skip_ignored": True})
    for mesh, cases in meshes(device):
        for (of_input, of_head), labels, how in itertools.product(cases, (target, several), ways):
            if labels is several and any(isinstance(placement, Shard) for placement in of_head):
                continue
            plain = [tensor.clone().to(device).requires_grad_() for tensor in (input, head, bias)]
            layouts = zip((input, head, bias), (of_input, of_head, of_head), strict=True)
            leaves = [distribute_tensor(tensor.to(device), mesh, layout).requires_grad_() for tensor, layout in layouts]
            wanted = xent_ops.linear_token_log_probs(*plain[:2], labels.to(device), linear_bias=plain[2], **how)
            found = xent_ops.linear_token_log_probs(*leaves[:2], labels.to(device), linear_bias=leaves[2], **how)
            counted = (labels if labels is target else labels[..., 0]).to(device) != -100
            for mine, theirs in zip(found, wanted, strict=True):
                of_rows = counted if mine.dim() == 2 else counted.unsqueeze(-1)
                torch.testing.assert_close(torch.where(of_rows, mine.full_tensor(), 0), torch.where(of_rows, theirs, 0))

            def scalar(values, factor, several=labels is not target):
                log_probs = values.log_probs.sum(-1) if several else values.log_probs
                return ((log_probs - 0.1 * values.entropy) * factor).sum()

            factor = distribute_tensor(up.to(device), mesh, found.lse.placements)
            grads = torch.autograd.grad(scalar(found, factor), leaves)
            expected = torch.autograd.grad(scalar(wanted, up.to(device)), plain)
            for grad, theirs, leaf in zip(grads, expected, leaves, strict=True):
                assert grad.placements == leaf.placements
                torch.testing.assert_close(grad.full_tensor(), theirs)


def other_products(device):
    """float16 with a small gradient, ignored rows left out and 8-bit products take four products of DTensors."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(8, 16, generator=generator), torch.randn(V, 16, generator=generator)
    target = torch.randint(0, V, (8,), generator=generator)
    target[3] = -100
    factors = torch.rand(8, generator=generator) + 0.1
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    ways = [
        (torch.float16, {"token_weight": factors}),
        (torch.float16, {"reduction": "sum", "divisor": 1e6}),
        (torch.bfloat16, {"skip_ignored": True}),
        (torch.bfloat16, {"products": "fp8_gradients"}),
        (torch.bfloat16, {"batch_invariant": True, "chunk_rows": 3}),
    ]
    for (dtype, how), (of_input, of_head) in itertools.product(
        ways, itertools.product((Replicate(), Shard(0)), (Replicate(), Shard(0)))
    ):
        how = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in how.items()}
        plain = [tensor.to(device, dtype).requires_grad_() for tensor in (hidden, weight)]
        x = distribute_tensor(hidden.to(device, dtype), mesh, [of_input]).requires_grad_()
        m = distribute_tensor(weight.to(device, dtype), mesh, [of_head]).requires_grad_()
        scale = 1e6 if "divisor" in how else 1.0  # a gradient scaler's
        wanted = xent_ops.linear_cross_entropy(*plain, target.to(device), **how)
        loss = xent_ops.linear_cross_entropy(x, m, target.to(device), **how)
        torch.testing.assert_close(loss.full_tensor(), wanted, rtol=1e-2, atol=0)
        grads = torch.autograd.grad(loss * scale, (x, m))
        for grad, theirs in zip(grads, torch.autograd.grad(wanted * scale, plain), strict=True):
            difference = (grad.full_tensor().double() - theirs.double()).norm()
            assert difference <= (0.1 if "products" in how else 0.02) * theirs.double().norm(), (how, of_input, of_head)


def batch_invariant(device):
    """A row's bits do not depend on the other rows, nor does its gradient; rows or classes split."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    input, head, _, _, target = (tensor.to(device) for tensor in head_of(torch.float32, (12,)))
    target = target.clamp(min=0)
    for of_input, of_head in itertools.product((Replicate(), Shard(0)), (Replicate(), Shard(0))):
        results = []
        for rows in (slice(0, 12), slice(4, 9)):
            x = distribute_tensor(input[rows].clone(), mesh, [of_input]).requires_grad_()
            m = distribute_tensor(head, mesh, [of_head])
            how = {"batch_invariant": True, "chunk_rows": 4}
            loss = xent_ops.linear_cross_entropy(x, m, target[rows], reduction="none", **how)
            (grad,) = torch.autograd.grad(
                loss, x, distribute_tensor(torch.ones_like(target[rows]).float(), mesh, loss.placements)
            )
            total = xent_ops.linear_cross_entropy(x, m, target[rows], reduction="sum", **how)
            (same,) = torch.autograd.grad(total, x)
            results.append([one.full_tensor() for one in (loss, grad, same)])
        for whole, part in zip(*results, strict=True):
            assert torch.equal(whole[4:9], part), (of_input, of_head)


def what_is_communicated(device):
    """No logits, no weight: statistics, the input and its gradient, and with rows sharded the weight's gradient."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    rows = 6 * world
    input, head, _, _, target = (tensor.to(device) for tensor in head_of(torch.float32, (rows,)))
    stats = ("all_gather_into_tensor.default", 3 * rows + 5)
    width = -(-V // world)
    cases = [
        (Replicate(), Shard(0), [stats, ("all_reduce.default", rows * H)]),
        (
            Shard(0),
            Shard(0),
            [("all_gather_into_tensor.default", 6 * H), stats, ("reduce_scatter_tensor.default", rows * H)],
        ),
        (Replicate(), Replicate(), []),
        (Shard(0), Replicate(), [*[("all_reduce_.default", n) for n in (2, 1)], ("all_reduce.default", V * H)]),
    ]
    assert width < V
    for of_input, of_head, forward in cases:  # which makes the gradients
        x = distribute_tensor(input, mesh, [of_input]).requires_grad_()
        m = distribute_tensor(head, mesh, [of_head]).requires_grad_()
        with Collectives() as mode:
            loss = xent_ops.linear_cross_entropy(x, m, target)
        assert mode.seen == forward, mode.seen
        with Collectives() as mode:
            loss.backward()
        assert mode.seen == [], mode.seen


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
    """What the backward reads, written after the loss, by the DTensor or its local tensor: an error."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    input, head, bias, _, target = (tensor.to(device) for tensor in head_of(torch.float32, (8,)))
    whole, split = [Replicate()], [Shard(0)]
    for of_input, of_head, index, reduction, of_local in itertools.product(
        (whole, split), (whole, split), range(3), ("mean", "none"), (False, True)
    ):
        layouts = zip((input, head, bias), (of_input, of_head, of_head), strict=True)
        leaves = [distribute_tensor(tensor, mesh, layout).requires_grad_() for tensor, layout in layouts]
        x, m, b = (leaf * 1 for leaf in leaves)
        loss = xent_ops.linear_cross_entropy(x, m, target, linear_bias=b, reduction=reduction).sum()
        with torch.no_grad():
            tensor = (x, m, b)[index]
            (tensor.to_local() if of_local else tensor).mul_(2)
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
        (
            (input, head, distribute_tensor(target, mesh, whole)),
            {},
            "target is a DTensor but input and linear_weight are not",
        ),
        ((x, distribute_tensor(head, other, [Replicate(), Shard(0)]), target), {}, "both must be on one mesh"),
        ((x, distribute_tensor(head, mesh, [Shard(1)]), target), {}, r"linear_weight is placed as .* valid are"),
        ((distribute_tensor(input, mesh, [Shard(1)]), m, target), {}, r"input is placed as .* valid are"),
        ((DTensor.from_local(input, mesh, [Partial()]), m, target), {}, r"input is placed as .* valid are"),
        ((x, m, target[:3]), {}, r"target has shape \(3,\); expected \(6,\)"),
        ((x, m, target), {"weight": weight[:3]}, rf"weight has shape \(3,\); expected \({V},\)"),
        ((x, m, target), {"divisor": 2.0}, 'expected reduction="sum"'),
        ((x, m, target), {"chunk_rows": 0}, "chunk_rows must be at least 1"),
        ((x, m, F.one_hot(target.clamp(min=0), V).float()), {}, "class probabilities need all logits"),
        ((x.double(), m, target), {}, "linear_weight has dtype torch.float32 but input torch.float64"),
    ]
    weights, labels = (distribute_tensor(tensor, mesh, whole) for tensor in (weight, target))
    with Collectives() as mode:
        for args, keywords, text in bad:
            with pytest.raises((ValueError, TypeError), match=text):
                xent_ops.linear_cross_entropy(*args, **keywords)
        with pytest.raises(TypeError, match="weight is a DTensor but the logits are not"):
            xent_ops.cross_entropy(input @ head.t(), target, weights)
        with pytest.raises(NotImplementedError, match="linear_cross_entropy_outputs of DTensors is not supported"):
            xent_ops.linear_cross_entropy_outputs(x, m, target)
        with pytest.raises(
            NotImplementedError, match="has no argmax, entropy, skip_ignored or products, and no float16"
        ):
            torch.ops.xent.linear_cross_entropy_with_grad(x, m, labels, skip_ignored=True)
    assert mode.seen == []
    x.requires_grad_()
    logits = distribute_tensor(input @ head.t(), mesh, [Shard(0)]).requires_grad_()
    for loss, leaf in (
        (xent_ops.linear_cross_entropy(x, m, target, linear_bias=b), x),
        (xent_ops.cross_entropy(logits, target), logits),
    ):
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(
            RuntimeError, match=r"no second derivative.* plain tensors of all classes \(full_tensor\(\)\)"
        ):
            grad.sum().backward()
