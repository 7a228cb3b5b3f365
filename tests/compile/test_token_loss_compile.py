"""A function of each token's statistics as the loss, compiled: one graph each way, any number of tokens, captures."""

import re
from functools import partial

import pytest
import torch
from helpers.graphs import AotEagerAndRecordGraphs, CompileCounterWithBackend, calls_of, inductor_code, operator_names
from helpers.heads import random_head
from helpers.token_losses import LOSSES, focal, grpo, reinforce, rows_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import xent_ops
from xent_ops.head import loop

V, H, N = 40, 16, 24


def inputs(device, rows=N, dtype=torch.float32):
    x, head, _, target = random_head(device, dtype, (rows,), V, H, seed=2)
    return x, head, target


def step_of(fn, function=xent_ops.linear_token_loss, reduction="sum", **options):
    def step(x, head, target, *rows):
        if function is xent_ops.token_loss:
            x, head = x.sin() @ head.t(), None
        given = (x, target) if head is None else (x.sin(), head, target)
        return function(*given, fn, rows=rows, reduction=reduction, **options)

    return step


def gradients(step, x, head, target, *rows):
    loss = step(x, head, target, *rows)
    return loss.detach(), *torch.autograd.grad(loss, (x, head))


# Each loss once; of both, one that reads all that there is.
OF_LOGITS = ("grpo", "dapo", "dft", "focal", "poly_1", "unlikelihood")
ONE_EACH = [(xent_ops.token_loss, name) for name in OF_LOGITS]
ONE_EACH += [(xent_ops.linear_token_loss, name) for name in LOSSES if name == "grpo" or name not in OF_LOGITS]


@pytest.mark.parametrize("function, name", ONE_EACH, ids=lambda case: getattr(case, "__name__", case))
def test_one_graph(device, name, function):
    tensors = inputs(device)
    tensors += rows_of(LOSSES[name], tensors[2].shape, device)
    chunks = {"chunk_rows": 10} if function is xent_ops.linear_token_loss else {}
    step = step_of(LOSSES[name], function, divisor=3.0, **chunks)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, *tensors), gradients(step, *tensors))


def test_the_graphs(device):
    """The function stands between operators, what it was tried on is gone, and the backward has no product."""
    backend, tensors = AotEagerAndRecordGraphs(), inputs(device)
    torch.compile(step_of(focal, chunk_rows=12), fullgraph=True, backend=backend)(*tensors).backward()
    (forward,), (backward,) = backend.fw_graphs, backend.bw_graphs
    ours = [name.split(".")[1] for name in operator_names(forward) if name.startswith("xent.")]
    # Of the operators that write, the functional graph has others in their place.
    chunk = ["linear_logits", "cross_entropy_forward", "linear_grad_input"]
    assert ours == [*chunk, *chunk, "attach_gradients"], ours
    assert sum("auto_functionalized" in name for name in operator_names(forward)) == 4
    tried = [
        node
        for node in forward.graph.nodes
        if node.target is torch.ops.aten.exp.default and node.meta["val"].shape == (2,)
    ]
    assert not tried
    assert not any("mm" in name for name in operator_names(backward))


@pytest.mark.slow  # two heads have it too
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_any_number_of_tokens(device, backend):
    """As long as the number of chunks is the same."""
    count = CompileCounterWithBackend(backend)
    step = step_of(reinforce, chunk_rows=16)
    compiled = torch.compile(step, fullgraph=True, backend=count)
    for rows in (N, 28):
        tensors = (*inputs(device, rows), *rows_of(reinforce, (rows,), device))
        for tensor in (tensors[0], *tensors[2:]):  # with dynamic=True Dynamo traces twice
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(gradients(compiled, *tensors), gradients(step, *tensors))
    assert count.frame_count == 1


def test_inductor(device):
    """The gradient is written over the chunk's logits, and scaled in place where the backward owns it."""
    tensors = inputs(device, dtype=torch.bfloat16)
    tensors += rows_of(grpo, tensors[2].shape, device)
    step = step_of(grpo, chunk_rows=8)
    compiled = torch.compile(step, fullgraph=True)
    code = inductor_code(compiled, *tensors)
    assert calls_of("scale_grad_", code) == 2 and calls_of("linear_scale_grad", code) == 0
    for mine, eager in zip(gradients(compiled, *tensors), gradients(step, *tensors), strict=True):
        torch.testing.assert_close(mine, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.slow  # Inductor compiles a loop of four chunks
def test_one_chunk_after_the_other(device):
    """Also where what is computed of all chunks reads one tensor: it must not be one kernel."""
    tensors = inputs(device)

    def step(x, head, target, old, advantage):
        number = (target != -100).sum()
        rows = (old, advantage)
        return xent_ops.linear_token_loss(
            x.sin(), head, target, grpo, rows=rows, reduction="sum", divisor=number, chunk_rows=6
        )

    compiled = torch.compile(step, fullgraph=True)
    code = inductor_code(compiled, *tensors, *rows_of(grpo, (N,), device))
    steps = re.findall(
        r"(?:xent\.|OPERATORS\[')(linear_logits|cross_entropy_backward_|linear_cross_entropy_chunk_add_)(?:\.default\(|'\])",
        code,
    )
    assert steps == ["linear_logits", "cross_entropy_backward_", "linear_cross_entropy_chunk_add_"] * 4, steps


def test_refused_while_tracing(device):
    learned, (x, head, target) = torch.ones((), device=device, requires_grad=True), inputs(device)
    for fn, options, text in (
        (lambda stats: stats.lse.mean(), {}, r"fn returned shape \(\) for 2 tokens"),
        (lambda stats: stats.lse * learned, {}, "closes over a tensor that requires grad"),
        (lambda stats: stats.lse.detach(), {}, "fn returned a tensor that needs no grad"),
        (focal, {"check": True}, "which a compiled graph cannot"),
    ):
        with pytest.raises(Exception, match=text):
            torch.compile(step_of(fn, **options), fullgraph=True, backend="aot_eager")(x, head, target)
        torch.compiler.reset()


@pytest.mark.parametrize("function", [xent_ops.linear_token_loss, xent_ops.token_loss])
def test_a_field_that_the_first_call_did_not_read(device, function):
    """A function whose own state changes while it is traced."""
    calls = []

    def fn(stats):
        calls.append(None)
        return -stats.log_probs if len(calls) < 3 else -stats.log_probs - stats.entropy

    with pytest.raises(Exception, match=r"fn reads stats\.entropy, which it did not read in its first call"):
        torch.compile(step_of(fn, function), fullgraph=True, backend="eager")(*inputs(device))


def test_a_function_that_writes_to_its_tokens(device):
    """The backward reads lse and entropy too."""

    def writing(stats):
        a, b = stats.lse.detach(), stats.entropy.detach()
        a -= 1.0
        b *= 2.0
        return stats.log_probs * (a + b) + 3 * stats.entropy

    def right(stats):
        return stats.log_probs * (stats.lse.detach() - 1 + 2 * stats.entropy.detach()) + 3 * stats.entropy

    step = torch.compile(step_of(writing, chunk_rows=12), fullgraph=True, backend="aot_eager")
    found, wanted = (gradients(one, *inputs(device))[1:] for one in (step, step_of(right)))
    torch.testing.assert_close(found, wanted)


def test_without_gradients_one_product(device):
    backend, (x, head, target) = AotEagerAndRecordGraphs(), inputs(device)
    step = step_of(focal)
    with torch.no_grad():
        value = torch.compile(step, fullgraph=True, backend=backend)(x, head, target)
    torch.testing.assert_close(value, step(x, head, target).detach())
    names = operator_names(backend.fw_graphs[0]) if backend.fw_graphs else operator_names(backend.graphs[0])
    assert sum("linear_cross_entropy" in name for name in names) == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inside_a_checkpoint(device, backend):
    """A checkpoint saves nothing here. One around torch alone works after it."""
    x, head, target = inputs(device)
    ids = target.unsqueeze(-1) + torch.arange(3, device=device)
    probs = torch.tensor([0.5, 0.2, 0.1], device=device).expand(N, 3)

    def with_a_tail(x, head, target):
        return xent_ops.linear_top_k_distillation_loss(x.sin(), head, ids.clamp(0, V - 1), probs, tail=True)

    def of_torch(x, head, target):
        return (x @ head.t()).sin().sum()

    of_lse = step_of(lambda stats: stats.lse - 0.1 * stats.entropy)
    for step in (step_of(focal, chunk_rows=10), of_lse, with_a_tail, of_torch):
        saved = partial(checkpoint, step, use_reentrant=False)
        wanted = gradients(step, x, head, target)
        compiled = torch.compile(saved, fullgraph=True, backend=backend)
        for function in (saved, compiled):
            torch.testing.assert_close(gradients(function, x, head, target), wanted)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_skipping(device, backend):
    """On a GPU packed, with as many rows as the device says; on a CPU all rows."""
    tensors = inputs(device, 48, torch.float32 if device == "cpu" else torch.bfloat16)
    tolerances = {} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    step = step_of(focal, chunk_rows=20, skip_ignored=True)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for mine, eager in zip(gradients(compiled, *tensors), gradients(step, *tensors), strict=True):
        torch.testing.assert_close(mine, eager, **tolerances)


@pytest.mark.gpu
@pytest.mark.parametrize("skip_ignored", [False, True])
@pytest.mark.parametrize("how", ["capture", "reduce-overhead"])
def test_cuda_graphs(how, skip_ignored):
    """Replayed on other data; nothing waits for the device."""
    tensors = [*inputs("cuda", 256, torch.bfloat16), *rows_of(grpo, (256,), "cuda")]
    divisor = torch.tensor(5.0, device="cuda")
    step = step_of(grpo, chunk_rows=100, divisor=divisor, skip_ignored=skip_ignored)
    if how == "capture":

        def run():
            loss = step(*tensors)
            loss.backward()
            return loss

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
            for tensor in tensors[:2]:
                tensor.grad = None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = run()
        made = [tensor.grad for tensor in tensors[:2]]

        def again():
            graph.replay()
            return [value.detach().clone() for value in (loss, *made)]
    else:
        compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")

        def again():
            return [value.clone() for value in gradients(compiled, *tensors)]

    for seed in range(4):
        torch.manual_seed(seed)
        for tensor in (*tensors[:2], *tensors[3:]):
            tensor.data.copy_(torch.randn_like(tensor))
        tensors[2].copy_(torch.randint(-1, V, (256,)))
        tensors[2][tensors[2] < 0] = -100
        divisor.fill_(seed + 1.0)
        for mine, eager in zip(again(), gradients(step, *tensors), strict=True):
            torch.testing.assert_close(mine, eager, rtol=2e-2, atol=2e-2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*tensors).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_is_the_gradients_and_one_chunk():
    classes, width, rows = 32000, 512, 4096
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(classes, (rows,), device="cuda")
    given = rows_of(grpo, (rows,), "cuda")
    chunk, own = 1024 * classes * 2, 2 * (classes + rows) * width
    for step in (step_of(grpo, chunk_rows=1024), torch.compile(step_of(grpo, chunk_rows=1024), fullgraph=True)):
        gradients(step, x, head, target, *given)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(step, x, head, target, *given)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= own + 1.15 * chunk + 4 * rows * width * 2, (peak / 2**20, own / 2**20, chunk / 2**20)


def test_the_last_chunk_ends_at_the_number_of_rows():
    """Else Inductor gets sizes of a symbol that no input of a backward of DTensors has."""
    found = []

    def trace(x):
        head = loop.HeadSlice(torch.empty(V, H), None, None, chunking=loop.Chunking(chunk_rows=3))
        ends, _ = loop._ends(x.shape[0], 2, [x], head, 2)
        found.extend((str(ends[-1]), str(x.shape[0])))
        return x.sin()

    make_fx(trace, tracing_mode="symbolic")(torch.randn(10, H))
    assert found[0] == found[1]
