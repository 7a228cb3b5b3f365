"""The head and the loss over ranks that hold some rows of the head; run on every rank by test_linear_parallel.py.

Expected values and budgets come from one process' float64 products.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from helpers import over_ranks
from helpers.covering import pairs
from helpers.exact_numbers import DIVISOR, exact_fp8_problem, exact_problem
from torch.utils.flop_counter import FlopCounterMode
from vocab_parallel_cases import OPTIONS, Collectives, V, same_bits_everywhere, shard_of, split

from xent_ops.distributed.bound import Shard, bind_shard
from xent_ops.distributed.groups import ranks_of
from xent_ops.distributed.linear import losses_and_sum
from xent_ops.linear_call import bind
from xent_ops.testing import assert_linear, linear_oracle

H = 8


def head_of(dtype, rows=(2, 5), bias=True):
    """(input, linear_weight, linear_bias, class weight, target), the same on every rank."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    target = torch.randint(0, V, rows, generator=generator)
    target.view(-1)[:3] = torch.tensor([-100, V - 1, 0])
    weight = torch.rand(V, generator=generator)
    return normal(*rows, H), normal(V, H) / 2, normal(V) if bias else None, weight, target


def rounded_sum(expected, input, head, bias, world, dtype):
    """Budgets for a gradient of the input that is a sum over ranks, each part of it rounded."""
    logits = input.double() @ head.double().t() + (0 if bias is None else bias.double())
    magnitude = (logits.softmax(-1) + 1) @ head.double().abs()  # of all parts, for an upstream gradient of one
    if magnitude.numel() == 0:
        return expected
    scale = expected.grads[0].abs().amax() / magnitude.amax().clamp(min=1e-30) + 1
    more = world * torch.finfo(dtype).eps * magnitude * scale
    of_input, *others = expected.grad_bounds
    return expected._replace(grad_bounds=(of_input + more.view_as(of_input), *others))


def one(device, kind, problem, group=None, sequence_dim=None, upstream=0.75, **options):
    """Loss, bits and gradients of one call on this rank."""
    input, head, bias, weight, target = problem
    world, place = dist.get_world_size(group), split(kind, V, group)
    if sequence_dim is not None:
        mine = input.chunk(world, sequence_dim)[dist.get_rank(group)].clone()
    else:
        mine = input.clone()
    x, w = (tensor.to(device).requires_grad_() for tensor in (mine, shard_of(head.t(), place).t().contiguous()))
    b = None if bias is None else shard_of(bias, place).to(device).requires_grad_()
    loss = over_ranks.linear_cross_entropy(
        x,
        w,
        target.to(device),
        group=group,
        num_classes=V,
        class_start=None if kind == "chunk" else place[0],
        linear_bias=b,
        weight=None if weight is None else shard_of(weight, place).to(device),
        sequence_parallel=sequence_dim is not None,
        **options,
    )
    upstream = torch.tensor(upstream, dtype=torch.float64)
    if options.get("reduction") == "none":
        upstream = torch.rand(target.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    same_bits_everywhere(loss, group)
    wanted = (x, w) if b is None else (x, w, b)
    grads = torch.autograd.grad(loss, wanted, upstream.to(loss))

    ours_alone = ("skip_ignored", "pipelined")
    of_oracle = {name: value for name, value in options.items() if name not in ours_alone}
    expected = linear_oracle(input, head, target, bias, weight, upstream=upstream, **of_oracle)
    expected = rounded_sum(expected, input, head, bias, world, input.dtype)
    start, size, _ = place
    mine = slice(start, start + size)
    of_input, of_bounds = expected.grads[0], expected.grad_bounds[0]
    if sequence_dim is not None:
        of_input, of_bounds = (v.chunk(world, sequence_dim)[dist.get_rank(group)] for v in (of_input, of_bounds))
    expected = expected._replace(
        grads=(of_input, *(grad[mine] for grad in expected.grads[1:])),
        grad_bounds=(of_bounds, *(bound[mine] for bound in expected.grad_bounds[1:])),
    )
    for grad, tensor in zip(grads, wanted, strict=True):
        assert grad.dtype == tensor.dtype and grad.shape == tensor.shape and grad.is_contiguous()
    for grad in grads[1:]:
        assert grad[size:].count_nonzero() == 0, "padding got a gradient"
    assert_linear(loss, (grads[0], *(grad[:size] for grad in grads[1:])), expected)


def values(device, kind, dtype):
    for bias, chunk_rows in ((True, 4), (False, None)):
        *problem, weight, target = head_of(dtype, bias=bias)
        reductions = ("none", "sum", "mean") if bias else ("mean",)
        for reduction, name, weighted in pairs(reductions, OPTIONS, (False, True)):
            options, w = (
                {"reduction": reduction, "chunk_rows": chunk_rows, **OPTIONS[name]},
                weight if weighted else None,
            )
            one(device, kind, (*problem, w, target), **options)
            if name == "all" and reduction != "none":
                one(device, kind, (*problem, w, target), pipelined=False, **options)
    others = (*problem, None, target.clamp(min=0).to(torch.int32))
    one(device, kind, others, ignore_index=0, reduction="sum", divisor=3.0, chunk_rows=3)
    for w in (None, weight):
        one(device, kind, (*problem, w, target), chunk_rows=4, skip_ignored=True, **OPTIONS["all"])
    # A mean of class weights where the ignored class has one too.
    one(device, kind, (*problem, weight, target.clamp(min=0)), ignore_index=0, chunk_rows=3)
    if dtype == torch.bfloat16:
        one(device, kind, others, ignore_index=0, accumulate_dtype=torch.float32, chunk_rows=3)
    if dtype == torch.float16:  # gradients of logits that float16 does not hold, unless what divides them comes later
        one(device, kind, (*problem, weight * 2.0**-40, target), chunk_rows=4)
        far = {"reduction": "sum", "divisor": 2.0**40, "upstream": -(2.0**40), "chunk_rows": 4}
        for pipelined in (None, False):
            one(device, kind, (*problem, None, target), pipelined=pipelined, **far)


def sequence_parallel(device):
    world = dist.get_world_size()
    for dtype, (rows, dim) in itertools.product(
        (torch.float32, torch.bfloat16), (((2 * world, 3), 0), ((3, 2 * world), 1), ((2, 3 * world, 2), 1))
    ):
        problem = head_of(dtype, rows)
        for reduction, kind in itertools.product(("none", "sum", "mean"), ("chunk", "uneven")):
            options = {"reduction": reduction, "chunk_rows": 5, **OPTIONS["all"]}
            one(device, kind, problem, sequence_dim=dim, **options)
            if reduction == "mean":
                one(device, kind, problem, sequence_dim=dim, pipelined=False, **options)


def losses_and_their_sum(device):
    """The losses are those of "none" as constants, and the sum has the gradients of "sum" with token weights."""
    world = dist.get_world_size()
    for dim, more in itertools.product((None, 0, 1), ({}, {"batch_invariant": True}, {"skip_ignored": True})):
        problem = head_of(torch.float32, (2 * world, 3 * world))
        options = {"chunk_rows": 5, "lse_square_scale": 0.1, "sequence_parallel": dim is not None, **more}
        x, shard, bias, target = leaves(device, *problem, sequence_dim=dim)
        factors = torch.rand(target.shape, generator=torch.Generator().manual_seed(9)).to(device)
        all_options = {"num_classes": V, "linear_bias": bias, **options}
        want = over_ranks.linear_cross_entropy(x, shard, target, reduction="none", **all_options)
        chunking = (None, 5, "skip_ignored" in more, None, None, "batch_invariant" in more)
        for in_forward in (True, False):
            with torch.set_grad_enabled(in_forward):
                call = bind(x, shard, target, bias, None, (-100, 0.0, None, 1.0, 0.1, "sum"), chunking, None, factors)
                call = bind_shard(call, ranks_of(None), Shard(V, sequence_parallel=dim is not None))
                losses, total = losses_and_sum(call, ranks_of(None))
            torch.testing.assert_close(losses, want)
            assert (total is not None) == (in_forward and "skip_ignored" not in more)
            if total is None:
                assert losses.requires_grad == in_forward
                total = (losses * factors).sum()
            else:
                assert not losses.requires_grad
                gradients = [torch.autograd.grad(one, (x, shard, bias)) for one in (total, (want * factors).sum())]
                torch.testing.assert_close(*gradients)
            torch.testing.assert_close(total, (want * factors).sum())


def leaves(device, input, head, bias, _, target, kind="chunk", sequence_dim=None):
    """This rank's (input, rows of the head, bias), which require grad, and the target."""
    place = split(kind, V)
    if sequence_dim is not None:
        input = input.chunk(dist.get_world_size(), sequence_dim)[dist.get_rank()]
    shards = (input, shard_of(head.t(), place).t().contiguous(), shard_of(bias, place))
    return *(tensor.clone().to(device).requires_grad_() for tensor in shards), target.to(device)


def classes_of(kind):
    """Keywords that say which classes this rank has."""
    return {"num_classes": V, "class_start": None if kind == "chunk" else split(kind, V)[0]}


def what_is_communicated(device):
    """3 or 4 numbers a row, the input's gradient where it is wanted; with a sequence, the input too. No sum is copied.

    The gradient backward, where the logits are made again; chunk by chunk forward, where they are not.
    """
    world, rows = dist.get_world_size(), 6 * dist.get_world_size()
    x, head, bias, target = leaves(device, *head_of(torch.float32, (rows,)))
    part = x.detach().chunk(world)[dist.get_rank()].clone().requires_grad_()
    stats = ("all_gather_into_tensor.default", 3 * rows + 5)
    inputs = ("all_gather_into_tensor.default", 6 * H)
    cases = [
        ((x, head, bias), {}, [stats], [("all_reduce_.default", rows * H)]),
        ((x, head.detach(), None), {}, [stats], [("all_reduce_.default", rows * H)]),
        ((x.detach(), head, None), {}, [stats], []),
        ((part, head, None), {"sequence_parallel": True}, [inputs, stats], [("reduce_scatter_tensor.default", rows * H)]),
        ((part.detach(), head, None), {"sequence_parallel": True}, [inputs, stats], []),
        ((x, head, None), {"weight": torch.rand(len(head), device=device)}, [(stats[0], 4 * rows + 5)], [("all_reduce_.default", rows * H)]),
    ]  # fmt: skip
    for (input, weight, b), options, forward, backward in cases:
        options.update(num_classes=V, linear_bias=b)
        with Collectives() as mode:
            loss = over_ranks.linear_cross_entropy(input, weight, target, pipelined=False, **options)
        assert mode.seen == forward
        with Collectives() as mode:
            loss.backward()
        assert mode.seen == backward

        *first, (name, numbers) = forward
        numbers = (numbers - 5) // 2 + 5
        of_chunk = [(gradient, size // 2) for gradient, size in backward]
        wanted = [(name, numbers), (name, numbers), *of_chunk, *of_chunk]  # the second gather before the first sum
        if first:
            wanted = [(name, size // 2) for name, size in (*first, *first)] + wanted
        if "weight" in options:
            wanted = [("all_reduce_.default", 1), *wanted]
        with Collectives() as mode:
            loss = over_ranks.linear_cross_entropy(input, weight, target, chunk_rows=rows // 2, **options)
        assert mode.seen == wanted, (mode.seen, wanted)
        with Collectives() as mode:
            loss.backward()
        assert mode.seen == []
    with Collectives() as mode, torch.no_grad():
        assert not over_ranks.linear_cross_entropy(x, head, target, num_classes=V).requires_grad
    assert mode.seen == [stats]


def flops(device):
    """A rank's products are those with its classes: three chunk by chunk, four where the logits are made again."""
    world = dist.get_world_size()
    x, head, _, target = leaves(device, *head_of(torch.float32, (6 * world,)))
    part = x.detach().chunk(world)[dist.get_rank()].clone().requires_grad_()
    classes = V // (2 * world)  # as many on each rank; the fewest that a rank has are more
    head = head.detach().narrow(0, 0, classes).clone().requires_grad_()
    target, product = target.clamp(max=classes - 1), 2 * 6 * world * H * classes
    for input, sequence_parallel in ((x, False), (part, True)):
        for pipelined, products in ((True, 3), (False, 4)):
            with FlopCounterMode(display=False) as counter:
                over_ranks.linear_cross_entropy(
                    input, head, target, num_classes=len(head) * world, pipelined=pipelined,
                    sequence_parallel=sequence_parallel, chunk_rows=2 * world,
                ).backward()  # fmt: skip
            assert counter.get_total_flops() == products * product


def groups_of_one_and_some(device):
    world = dist.get_world_size()
    problem = head_of(torch.float32)
    alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    for dim in (None, 0):
        with Collectives() as mode:
            input, head, bias, _, target = (tensor.to(device) for tensor in problem)
            input.requires_grad_()
            loss = over_ranks.linear_cross_entropy(
                input, head, target, group=alone, num_classes=V, linear_bias=bias, sequence_parallel=dim is not None
            )
            loss.backward()
        assert mode.seen == []
    one(device, "chunk", problem, group=alone)
    some = [world - 1, 0]  # not in the order of their global numbers
    part = dist.new_group(some)
    if dist.get_rank() in some:
        one(device, "chunk", problem, group=part)
    dist.barrier()


def edge_rows(device):
    """All rows ignored, no rows; a shard of -inf; shards that do not tile."""
    input, head, bias, _, target = head_of(torch.float32)
    x, w, b, t = leaves(device, input, head, bias, None, torch.full_like(target, -100))
    for rows in (slice(None), slice(0)):
        for reduction, options in itertools.product(("mean", "sum"), ({}, {"lse_square_scale": 0.1, "chunk_rows": 3})):
            loss = over_ranks.linear_cross_entropy(
                x[rows], w, t[rows], num_classes=V, linear_bias=b, reduction=reduction, **options
            )
            assert loss.isnan() if reduction == "mean" else loss == 0
            for grad in torch.autograd.grad(loss, (x, w, b)):
                assert grad.count_nonzero() == 0

    masked = bias.clone()
    masked[: -(-V // dist.get_world_size())] = float("-inf")
    one(device, "chunk", (input, head, masked, None, torch.full_like(target, V - 1)), reduction="mean", chunk_rows=4)

    for rows, pipelined in itertools.product((slice(None), slice(0)), (None, False)):  # without features
        problem = (input[rows, :, :0], head[:, :0], bias, None, target[rows])
        one(device, "chunk", problem, reduction="sum", pipelined=pipelined)

    start = split("chunk", V)[0]
    for first in (0, min(start + 1, V - len(w))):
        loss = over_ranks.linear_cross_entropy(x, w, target.to(device), num_classes=V, class_start=first)
        assert loss.isnan() and all(grad.isnan().any() for grad in torch.autograd.grad(loss, (x, w)))


def backward_again(device):
    """retain_graph gives the same bits; a second derivative is refused."""
    x, w, b, target = leaves(device, *head_of(torch.float32))
    for pipelined in (False, True):
        loss = over_ranks.linear_cross_entropy(
            x, w, target, num_classes=V, linear_bias=b, chunk_rows=4, pipelined=pipelined
        )
        factor = torch.tensor(3.0, device=device)
        first = torch.autograd.grad(loss, (x, w, b), factor, retain_graph=True)
        again = torch.autograd.grad(loss, (x, w, b), factor, retain_graph=True)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            grads = torch.autograd.grad(loss, (x, w, b), factor, create_graph=True)
            torch.autograd.grad(grads[1].sum(), w)
        last = torch.autograd.grad(loss, (x, w, b), factor)
        for one_grad, *others in zip(first, again, last, strict=True):
            assert all(torch.equal(one_grad, other) for other in others)
        with pytest.raises(RuntimeError, match=r"retain_graph=True|retain_variables|second time"):
            torch.autograd.grad(loss, (x, w, b))


def batch_of_upstream_gradients(device):
    """is_grads_batched: as one after another, or an error where the backward communicates."""
    x, w, b, target = leaves(device, *head_of(torch.float64))
    factors = torch.tensor([1.0, -2.0, 0.0], device=device, dtype=torch.float64)
    for reduction, pipelined in (("mean", None), ("sum", None), ("mean", False), ("none", None)):

        def loss_of(x, reduction=reduction, pipelined=pipelined):
            options = {"num_classes": V, "linear_bias": b, "reduction": reduction, "pipelined": pipelined}
            return over_ranks.linear_cross_entropy(x, w, target, **options)

        loss, wanted = loss_of(x), (x, w, b)
        upstream = factors if loss.dim() == 0 else factors[:, None, None] * torch.rand_like(loss)
        if reduction == "none" or pipelined is False:
            with Collectives() as mode, pytest.raises(NotImplementedError, match="which takes no batch of upstream"):
                torch.autograd.grad(loss, wanted, upstream, is_grads_batched=True)
            assert mode.seen == []
            loss, wanted = loss_of(x.detach()), (w, b)
        batched = torch.autograd.grad(loss, wanted, upstream, is_grads_batched=True, retain_graph=True)
        one_by_one = [torch.autograd.grad(loss, wanted, one, retain_graph=True) for one in upstream]
        for mine, theirs in zip(batched, zip(*one_by_one, strict=True), strict=True):
            torch.testing.assert_close(mine, torch.stack(theirs))


def checkpoint(device):
    """There the logits are made again in the backward, not the gradients twice."""
    x, w, b, target = leaves(device, *head_of(torch.float32))
    arguments = {"num_classes": V, "linear_bias": b}
    loss = torch.utils.checkpoint.checkpoint(
        lambda: over_ranks.linear_cross_entropy(x, w, target, **arguments), use_reentrant=False
    )
    with Collectives() as mode:
        grads = torch.autograd.grad(loss, (x, w, b))
    assert [name for name, _ in mode.seen] == ["all_gather_into_tensor.default", "all_reduce_.default"]
    wanted = torch.autograd.grad(over_ranks.linear_cross_entropy(x, w, target, **arguments), (x, w, b))
    torch.testing.assert_close(grads, wanted)


def autocast(device):
    x, w, b, target = leaves(device, *head_of(torch.float32))
    with torch.autocast(device, torch.bfloat16):
        loss = over_ranks.linear_cross_entropy(x, w, target, num_classes=V, linear_bias=b)
    wanted = over_ranks.linear_cross_entropy(
        x.bfloat16(), w.bfloat16(), target, num_classes=V, linear_bias=b.bfloat16()
    )
    assert torch.equal(loss, wanted) and loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, (x, w, b))
    assert all(grad.dtype == torch.float32 for grad in grads)


def exact_numbers(device):
    """The bits of one product, however the classes are split, with chunks of any size and rows split over the ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype, kind, chunk_rows, sequence_parallel, skip_ignored, products in itertools.product(
        (torch.bfloat16, torch.float16), ("chunk", "uneven"), (5, None), (False, True), (False, True), (None, "fp8")
    ):
        numbers = exact_problem if products is None else exact_fp8_problem
        (x, head, target), (of_input, of_head) = numbers(dtype)
        place = split(kind, len(head))
        start, size, _ = place
        if sequence_parallel:
            x, of_input = x.chunk(world)[rank].clone(), of_input.chunk(world)[rank]
        x, shard = (tensor.to(device).requires_grad_() for tensor in (x, shard_of(head.t(), place).t().contiguous()))
        loss = over_ranks.linear_cross_entropy(
            x,
            shard,
            target.to(device),
            num_classes=len(head),
            class_start=None if kind == "chunk" else start,
            reduction="sum",
            divisor=DIVISOR,
            chunk_rows=chunk_rows,
            sequence_parallel=sequence_parallel,
            skip_ignored=skip_ignored,
            products=products,
        )
        grads = torch.autograd.grad(loss, (x, shard))
        assert torch.equal(grads[0].cpu(), of_input) and torch.equal(
            grads[1][:size].cpu(), of_head[start : start + size]
        )
