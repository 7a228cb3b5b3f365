"""torch.compile of the head and the loss over ranks; run on every rank by test_linear_parallel.py."""

import re
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import over_ranks
from helpers.graphs import AotEagerAndRecordGraphs, Partitioned
from linear_parallel_cases import H, classes_of, head_of, leaves
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from vocab_parallel_cases import V, same_bits_everywhere, split

import xent_ops
from xent_ops.distributed import vocab_parallel_cross_entropy
from xent_ops.inductor.lowerings import save


def step_of(group, pipelined=None, sequence_parallel=False, **options):
    place = {"pipelined": pipelined, "sequence_parallel": sequence_parallel}
    shard = xent_ops.distributed.Shard(V, group, **place)  # not made in the graph

    def step(h, head, target, bias=None, weight=None):
        hidden = h * 2  # an intermediate, as a layer's output is
        return xent_ops.linear_cross_entropy(
            hidden, head, target, linear_bias=bias, weight=weight, shard=shard, **options
        )

    return step


def equal_to_eager(device, backend):
    """fullgraph forward and backward, N dynamic: one graph for all N, and what eager gives."""
    world, rank = dist.get_world_size(), dist.get_rank()
    full = {"label_smoothing": 0.125, "lse_square_scale": 1e-3, "softcap": 20.0, "chunk_rows": 4}
    name = dist.group.WORLD.group_name
    cases = [({**full, "pipelined": False}, name, True), ({"sequence_parallel": True}, None, False)]
    if backend != "inductor":
        cases += [({"reduction": "none"}, None, True)]
    for options, group, weighted in cases:
        torch.compiler.reset()
        step = step_of(group, **options)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for number, rows in enumerate((6, 11)):
            x, head, bias, target = leaves(device, *head_of(torch.float32, (world * rows, 2)))
            if "sequence_parallel" in options:
                x = x.detach().chunk(world)[rank].clone().requires_grad_()
            # With dynamic=True the floats are symbols at first, and torch traces and compiles everything twice.
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(target, 0)
            weight = torch.rand(len(head), device=device) if weighted else None
            results = []
            for function in (step, compiled):
                with torch._dynamo.config.patch(error_on_recompile=function is compiled and number > 0):
                    loss = function(x, head, target, bias, weight)
                grads = torch.autograd.grad(loss.sum(), (x, head, bias))
                results.append((loss.detach(), *grads))
            torch.testing.assert_close(*results, rtol=2e-5, atol=1e-6)
            same_bits_everywhere(results[1][0])


def pipeline_equal_to_eager(device):
    """Several chunks, fixed N."""
    world, rank = dist.get_world_size(), dist.get_rank()
    full = {"label_smoothing": 0.125, "lse_square_scale": 1e-3, "softcap": 20.0, "chunk_rows": 5}
    for options, weighted, dtype in (
        (full, True, torch.float32),
        ({"sequence_parallel": True, "chunk_rows": 5}, False, torch.float32),
        (full, False, torch.float16),
    ):
        torch.compiler.reset()
        step = step_of(None, **options)
        x, head, bias, target = leaves(device, *head_of(dtype, (6 * world, 2)))
        if "sequence_parallel" in options:
            x = x.detach().chunk(world)[rank].clone().requires_grad_()
        weight = torch.rand(len(head), device=device) if weighted else None
        results = []
        for function in (step, torch.compile(step, fullgraph=True)):
            loss = function(x, head, target, bias, weight)
            results.append((loss.detach(), *torch.autograd.grad(loss * 3, (x, head, bias))))
        torch.testing.assert_close(*results, rtol=2e-5 if dtype == torch.float32 else 2e-3, atol=1e-6)
        same_bits_everywhere(results[1][0])


def empty_shards(device):
    """The first rank has no class. The checks compare numbers of rows that are symbols, where no tensor fixes them.

    Dynamo traces the checks. The losses that AOTAutograd traces too are the one in a chunk and the one of logits."""
    _empty_shards(device, by_aot={0, 1})


def empty_shards_by_aot_autograd(device):
    _empty_shards(device, by_aot=set(range(2, 9)))


def _empty_shards(device, by_aot):
    x, head, _, target = leaves(device, *head_of(torch.float32, (6,)), kind="empty")
    ids, shard = torch.stack([target, target.clamp(min=1) - 1], -1), classes_of("empty")
    probs = torch.full(ids.shape, 0.4, device=device)
    functions = (
        lambda h, w, t: vocab_parallel_cross_entropy(h @ w.t(), t, **shard),
        lambda h, w, t: over_ranks.linear_cross_entropy(h, w, t, **shard),
        lambda h, w, t: over_ranks.linear_cross_entropy(h, w, t, reduction="none", **shard).sum(),
        lambda h, w, _: over_ranks.linear_top_k_distillation_loss(h, w, ids, probs, tail=True, **shard),
        lambda h, w, t: over_ranks.linear_token_log_probs(h, w, t, **shard).log_probs.sum(),
        lambda h, w, _: over_ranks.linear_token_log_probs(h, w, ids, **shard).log_probs.sum(),
        lambda h, w, t: over_ranks.linear_token_loss(h, w, t, lambda stats: stats.lse.square(), **shard),
        lambda h, w, _: over_ranks.linear_distillation_loss(h, w, h.detach(), -w.detach(), **shard),
    )
    for place, function in enumerate(functions):
        wanted = torch.autograd.grad(function(x, head, target), (x, head))
        torch.compiler.reset()
        rows = [x.detach().clone().requires_grad_(), target.clone()]
        dynamic = True if "ids" in function.__code__.co_freevars else None  # floats are symbols too
        backend = "aot_eager" if place in by_aot else "eager"
        if dynamic is None:
            for tensor in rows:
                torch._dynamo.mark_dynamic(tensor, 0)
        compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
        loss = compiled(rows[0], head, rows[1])
        torch.testing.assert_close(torch.autograd.grad(loss, (rows[0], head)), wanted)
    torch.compiler.reset()
    backend = "aot_eager" if 8 in by_aot else "eager"
    compiled = torch.compile(over_ranks.linear_top_k, fullgraph=True, backend=backend, dynamic=True)
    found, wanted = (f(x, head, 5, target, **shard) for f in (compiled, over_ranks.linear_top_k))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def called(code):
    """Operators and collectives in the order in which Inductor's Python code calls them: ours on CUDA by their kernel."""
    found = re.findall(r"ops\.(?:xent|_c10d_functional)\.(\w+)\.default\(|OPERATORS\['(\w+)'\]\.on_triton\(", code)
    return [by_dispatcher or kernel for by_dispatcher, kernel in found]


def order_of_the_pipeline(device):
    """Inductor's code calls operators and collectives in the order in which they overlap, and copies nothing."""
    from torch._inductor.utils import run_and_get_code

    world = dist.get_world_size()
    x, head, bias, target = leaves(device, *head_of(torch.float32, (6 * world,)))

    def run():
        torch.compile(step_of(None, chunk_rows=2 * world), fullgraph=True)(x, head, target, bias).backward()

    _, (forward, backward) = run_and_get_code(run)
    calls = called(forward[forward.index("def call") :])
    make, gather, wait = ("linear_logits", "all_gather_into_tensor", "wait_tensor")
    begin = [make, "cross_entropy_shard", gather]
    end = [
        "cross_entropy_shard_join",
        "cross_entropy_backward_",
        "linear_grad_input",
        "all_reduce_",
        "linear_cross_entropy_chunk_add_",
    ]
    last = "attach_gradients"
    assert [call for call in calls if call != wait] == [*begin, *begin, *end, *begin, *end, *end, last], calls
    if device == "cuda":
        assert calls[-4:] == [wait, wait, wait, last], "the all-reduces are waited for at the end"
    for i, call in enumerate(calls):
        gathers, waits, gradients = (calls[:i].count(name) for name in (gather, wait, "cross_entropy_backward_"))
        if call == "cross_entropy_shard_join":
            assert waits > gradients, "it reads what was gathered"
        if call in (gather, "all_reduce_") and device == "cpu":
            assert calls[i + 1] == wait, "one collective of gloo is in flight at a time"
        if call == make and device == "cuda" and gathers > 0:
            assert waits < gathers, "the chunk before is gathered beside this product"
    assert "scale_grad_" in called(backward) and "linear_scale_grad" not in called(backward)


def gradients_are_made_once(device):
    """Whatever else is recomputed."""
    from torch._inductor.utils import run_and_get_code

    x, head, bias, target = leaves(device, *head_of(torch.float32, (12,)))
    plain = step_of(None, chunk_rows=6)
    expected = torch.autograd.grad(plain(x, head, target, bias), (x, head, bias))
    for patch, step in (
        ({"aggressive_recomputation": True}, plain),
        ({"activation_memory_budget": 0.0}, plain),
        ({}, partial(checkpoint, plain, use_reentrant=False)),
    ):
        torch.compiler.reset()
        with torch._functorch.config.patch(patch):
            compiled = torch.compile(step, fullgraph=True)
            grads, codes = run_and_get_code(
                lambda run: torch.autograd.grad(run(x, head, target, bias), (x, head, bias)), compiled
            )
        torch.testing.assert_close(grads, expected)
        made = called("".join(codes)).count("linear_logits")
        assert made == 2, (made, patch)
        assert "scale_grad_" in called(codes[-1]) and "linear_scale_grad" not in called(codes[-1])


def _recompute_all(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


def gradients_are_made_once_in_a_checkpoint(device):
    """The partitioned backward scales what the forward has made; without the marks it would make that again."""
    _gradients_are_made_once(device, slice(0, 3))


def gradients_are_made_once_in_other_checkpoints(device):
    """Of one that recomputes everything; of inputs that are split."""
    _gradients_are_made_once(device, slice(3, None))


def _gradients_are_made_once(device, cases):
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    x, head, bias, target = leaves(device, *head_of(torch.float32, (6 * world, 2)))
    part = x.detach().chunk(world)[dist.get_rank()].clone().requires_grad_()

    def of_dtensors(x, head, target, bias):
        hidden = DTensor.from_local(x * 2, mesh, [Replicate()])
        head, bias = (
            DTensor.from_local(t, mesh, [Shard(0)], shape=torch.Size((V, *t.shape[1:])), stride=t.stride())
            for t in (head, bias)
        )
        return xent_ops.linear_cross_entropy(hidden, head, target, linear_bias=bias).to_local()

    two, one = {"chunk_rows": 6 * world}, {}
    everything = {"context_fn": partial(create_selective_checkpoint_contexts, _recompute_all)}
    for step, input, chunks, context, marked in (
        (step_of(None, **two), x, 2, {}, True),
        (step_of(None, **two), x, 2, {}, False),
        (of_dtensors, x, 1, {}, True),
        (step_of(None, **one), x, 1, everything, True),
        (step_of(None, sequence_parallel=True, **two), part, 2, {}, True),
    )[cases]:

        def loss_of(x, head, *rest, step=step):
            return step(x.sin(), head.cos(), *rest).sin()

        args = (input, head, target, bias)
        backend = Partitioned()
        torch.compiler.reset()
        with nullcontext() if marked else mock.patch.object(save.SaveGradients, "apply", lambda *_: 0):
            compiled = torch.compile(
                partial(checkpoint, loss_of, use_reentrant=False, **context), fullgraph=True, backend=backend
            )
            results = [torch.autograd.grad(function(*args), (input, head, bias)) for function in (loss_of, compiled)]
        torch.testing.assert_close(*results)
        assert backend.calls("linear_logits") == [chunks, 0 if marked else chunks]


def graphs_of(step, *args):
    backend = AotEagerAndRecordGraphs()
    torch.compile(step, fullgraph=True, backend=backend)(*args).backward()

    def calls(graphs):
        (module,) = graphs
        names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        return [name.removesuffix(".default") for name in names if name.startswith(("xent.", "_c10d"))]

    return calls(backend.fw_graphs), calls(backend.bw_graphs)


def graph(device):
    """Every collective stands between operators, in the forward and in the backward graph."""
    world = dist.get_world_size()
    x, head, _, target = leaves(device, *head_of(torch.float32, (6 * world,)))
    wait = "_c10d_functional.wait_tensor"
    gather = ["_c10d_functional.all_gather_into_tensor", wait]
    shard, join = "xent.linear_cross_entropy_shard", "xent.linear_cross_entropy_shard_join"
    again = {"pipelined": False}
    forward, backward = graphs_of(step_of(None, **again), x, head, target)
    assert forward == [shard, *gather, join]
    assert backward == ["xent.linear_cross_entropy_backward", "_c10d_functional.all_reduce", wait]

    part = x.detach()[:6].clone().requires_grad_()
    forward, backward = graphs_of(step_of(None, sequence_parallel=True, **again), part, head, target)
    assert forward == [*gather, shard, *gather, join]
    assert backward == ["xent.linear_cross_entropy_backward", "_c10d_functional.reduce_scatter_tensor", wait]

    forward, backward = graphs_of(step_of(None, **again), x.detach(), head, target)
    assert forward == [shard, *gather, join] and backward == ["xent.linear_cross_entropy_backward"]

    value, scale = "xent.attach_gradients", "xent.linear_scale_grad"
    forward, backward = graphs_of(step_of(None), x, head, target)
    join = "xent.cross_entropy_shard_join"
    begin = ["xent.linear_logits", "xent.cross_entropy_shard"]
    end = ["xent.linear_grad_input", "_c10d_functional.all_reduce", wait, value]
    assert forward == [*begin, *gather, join, *end], forward
    assert backward == [scale, scale]


def bad_input_while_tracing(device):
    x, head, _, target = leaves(device, *head_of(torch.float32, (6,)))
    compiled = torch.compile(
        lambda x, w, t, **k: over_ranks.linear_cross_entropy(x, w, t, num_classes=V, **k),
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises(Exception, match="DTensor's chunk rule"):
        compiled(x, head[1:], target)
    with pytest.raises(Exception, match="check=True compares values between ranks"):
        compiled(x, head, target, check=True)


def captured(step, args, wanted):
    """Loss and gradients of a captured step, and the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(step(*args), wanted)
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        loss = step(*args)
        grads = torch.autograd.grad(loss, wanted)
    return recorded, loss, grads


def cuda_graph_of_a_step(device):
    """Captured once with NCCL, eager and compiled, replayed with other inputs and targets."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for options in ({}, {"sequence_parallel": True}):
        eager = step_of(None, label_smoothing=0.125, chunk_rows=4, **options)
        x, head, _, target = leaves(device, *head_of(torch.bfloat16, (6 * world,)))
        if options:
            x = x.detach().chunk(world)[rank].clone().requires_grad_()
        for function in (eager, torch.compile(eager, fullgraph=True)):
            recorded, loss, grads = captured(function, (x, head, target), (x, head))
            for seed in (1, 2):
                generator = torch.Generator().manual_seed(seed)
                other = torch.randn(6 * world, H, generator=generator).to(x)
                with torch.no_grad():
                    x.copy_(other.chunk(world)[rank] if options else other)
                target.copy_(torch.randint(0, V, target.shape, generator=generator))
                recorded.replay()
                expected = function(x, head, target)
                torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=0)
                for grad, wanted in zip(grads, torch.autograd.grad(expected, (x, head)), strict=True):
                    torch.testing.assert_close(grad, wanted, rtol=0, atol=0)


def cuda_graphs_of_inductor(device):
    """``mode="reduce-overhead"``: recorded and replayed by Inductor, the collectives with the rest."""
    start, size, _ = split("chunk", V)
    head = torch.randn(V, H, generator=torch.Generator().manual_seed(1))[start : start + size].to(device)
    head.requires_grad_()

    def step(h, target):
        return over_ranks.linear_cross_entropy(h * 2, head, target, num_classes=V)

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)  # the same on every rank
        target, h = torch.randint(0, V, (16,), device=device), torch.randn(16, H).to(device).requires_grad_()
        results = []
        for function in (step, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            head.grad = h.grad = None
            loss = function(h, target)
            loss.backward()
            results.append((loss.detach().clone(), head.grad.clone(), h.grad.clone()))
        torch.testing.assert_close(*results, rtol=2e-5, atol=1e-6)
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
