"""torch.compile of the vocabulary-parallel loss; run on every rank by test_vocab_parallel.py."""

import torch
import torch.distributed as dist
from helpers.graphs import calls_of
from linear_compiled_cases import captured, graphs_of
from vocab_parallel_cases import V, same_bits_everywhere, split

from xent_ops.distributed import vocab_parallel_cross_entropy
from xent_ops.testing import realistic_logits


def inputs(device, rows, dtype=torch.float32):
    start, size, _ = split("chunk", V)
    logits = realistic_logits(rows, V, dtype=dtype, seed=rows)[:, start : start + size]
    target = torch.randint(0, V, (rows,), generator=torch.Generator().manual_seed(rows))
    target[rows // 2] = -100
    return logits.to(device), target.to(device)


def step_of(group, **options):
    def step(h, target, weight):
        logits = h * 2  # an intermediate, as a layer's output is
        return vocab_parallel_cross_entropy(logits, target, group, num_classes=V, weight=weight, **options)

    return step


def equal_to_eager(device, backend):
    """fullgraph forward and backward, N dynamic: one graph for all N, and what eager gives."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    options = {"label_smoothing": 0.125, "lse_square_scale": 1e-3, "softcap": 20.0}
    cases = [({}, None, None)]
    if backend != "inductor":
        cases += [
            (options, mesh, None),
            (options, mesh.get_group().group_name, "weight"),
            ({"reduction": "none"}, mesh.get_group(), None),
        ]
    else:
        cases += [(options, mesh, "weight")]
    for keywords, group, weight in cases:
        torch.compiler.reset()
        step = step_of(group, **keywords)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for rows in (6, 11, 24):
            logits, target = inputs(device, rows)
            w = None if weight is None else torch.rand(logits.shape[-1], device=device)
            results = []
            for function in (step, compiled):
                x = logits.clone().requires_grad_()
                torch._dynamo.mark_dynamic(x, 0)  # dynamic=True takes twice as long: see linear_compiled_cases.py
                torch._dynamo.mark_dynamic(target, 0)
                with torch._dynamo.config.patch(error_on_recompile=function is compiled and rows != 6):
                    loss = function(x, target, w)
                loss.sum().backward()
                results.append((loss.detach(), x.grad))
            torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=1e-7)
            same_bits_everywhere(results[1][0])


def graph(device):
    """The collective stands in the forward graph, between the operators; the backward graph has none."""
    logits, target = inputs(device, 6)
    gather = ["_c10d_functional.all_gather_into_tensor", "_c10d_functional.wait_tensor"]
    forward, backward = graphs_of(step_of(None), logits.requires_grad_(), target, None)
    assert forward == ["xent.cross_entropy_shard", *gather, "xent.cross_entropy_shard_reduced"]
    assert backward == ["xent.cross_entropy_backward"]


def lowered_for_inductor(device):
    """The gradient is written over the dead logits: by our kernels where they serve, else by what Inductor fuses."""
    from torch._inductor.utils import run_and_get_code

    from xent_ops.inductor.lowerings import reuse

    def step(h, w, target):
        return vocab_parallel_cross_entropy(h @ w, target, num_classes=V)

    logits, target = inputs(device, 64)
    h, w = torch.randn(64, 8, device=device, requires_grad=True), torch.randn(8, logits.shape[-1], device=device)
    w.requires_grad_()

    def run():
        torch.compile(step, fullgraph=True)(h, w, target).backward()

    _, codes = run_and_get_code(run)
    code = "\n".join(codes)
    assert "all_gather_into_tensor" in code
    assert calls_of("cross_entropy_shard", code) == 1 and calls_of("cross_entropy_shard_reduced", code) == 1
    assert calls_of("cross_entropy_backward", code) == 0  # the gradient takes the logits' place
    assert calls_of("cross_entropy_backward_", code) == reuse.writes_over(device)


def bad_input_while_tracing(device):
    import pytest

    logits, target = inputs(device, 6)
    compiled = torch.compile(
        lambda x, t, **k: vocab_parallel_cross_entropy(x, t, num_classes=V, **k), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="DTensor's chunk rule"):
        compiled(logits[:, 1:], target)
    with pytest.raises(Exception, match="check=True compares values between ranks"):
        compiled(logits, target, check=True)


def cuda_graph_of_a_step(device):
    """Captured once with NCCL, replayed with other logits and targets."""
    step = step_of(None, label_smoothing=0.125)
    logits, target = inputs(device, 16)
    x = logits.clone().requires_grad_()
    recorded, loss, (grad,) = captured(step, (x, target, None), x)
    for seed in (1, 2):
        other = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)).to(device)
        other_target = torch.randint(0, V, target.shape, generator=torch.Generator().manual_seed(seed)).to(device)
        with torch.no_grad():
            x.copy_(other)
        target.copy_(other_target)
        recorded.replay()
        y = other.requires_grad_()
        expected = step(y, other_target, None)
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=0)
        torch.testing.assert_close(grad, torch.autograd.grad(expected, y)[0], rtol=0, atol=0)


def cuda_graphs_of_inductor(device):
    """``mode="reduce-overhead"``: recorded and replayed by Inductor, the collective with the rest."""
    head = torch.randn(8, inputs(device, 16)[0].shape[-1], device=device, requires_grad=True)

    def step(h, target):
        return vocab_parallel_cross_entropy(h @ head, target, num_classes=V)

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)  # the same targets on every rank
        target = torch.randint(0, V, (16,), device=device)
        h = torch.randn(16, 8, device=device)
        results = []
        for function in (step, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            head.grad = None
            loss = function(h, target)
            loss.backward()
            results.append((loss.detach().clone(), head.grad.clone()))
        torch.testing.assert_close(*results, rtol=2e-5, atol=1e-6)
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
