"""Distillation compiled: one graph each way, gradients that are made once and scaled in place, any number of rows."""

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import (
    AotEagerAndRecordGraphs,
    CompileCounterWithBackend,
    Partitioned,
    calls_of,
    operator_names,
    run_and_get_code,
)
from torch._functorch import config

import xent_ops

V, H, TEACHER_H, N = 40, 16, 8, 24
LINEAR = "linear_divergences_with_grad"


def inputs(device, rows=N):
    generator = torch.Generator().manual_seed(2)
    shapes = ((rows, H), (V, H), (rows, TEACHER_H), (V, TEACHER_H))
    x, head, teacher, teacher_head = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    target = torch.randint(V, (rows,), generator=generator)
    target[::5] = -100
    return x.requires_grad_(), head.requires_grad_(), teacher, teacher_head, target.to(device)


def of_heads(x, head, teacher, teacher_head, target):
    options = {"beta": 0.5, "hard_weight": 0.5, "temperature": 2.0, "chunk_rows": 10}
    return xent_ops.linear_distillation_loss(x.sin(), head, teacher, teacher_head, target=target, **options)


def of_logits(x, head, teacher, teacher_head, target):
    logits, teacher_logits = F.linear(x.sin(), head), F.linear(teacher, teacher_head)
    return xent_ops.distillation_loss(logits, teacher_logits, target=target, beta=0.5, softcap=5.0)


def without_target(x, head, teacher, teacher_head, target):
    return xent_ops.linear_distillation_loss(x.sin(), head, teacher, teacher_head, beta=1.0)


def rows(x, head, teacher, teacher_head, target):
    options = {"target": target, "beta": 0.5, "reduction": "none", "chunk_rows": 10}
    return (xent_ops.linear_distillation_loss(x.sin(), head, teacher, teacher_head, **options) * target.cos()).sum()


STEPS = [of_heads, of_logits, without_target, rows]


def gradients(step, x, head, *rest):
    loss = step(x, head, *rest)
    return loss.detach(), *torch.autograd.grad(loss, (x, head))


def test_the_graphs(device):
    """One operator has all the products; the backward scales what it made."""
    backend, tensors = AotEagerAndRecordGraphs(), inputs(device)
    torch.compile(of_heads, fullgraph=True, backend=backend)(*tensors).backward()
    (forward,), (backward,) = backend.fw_graphs, backend.bw_graphs
    assert [name for name in operator_names(forward) if name.startswith("xent.")] == [f"xent.{LINEAR}.default"]
    ours = [name for name in operator_names(backward) if name.startswith("xent.")]
    assert ours == ["xent.linear_scale_grad.default"] * 2
    assert not any("mm" in name for graph in (forward, backward) for name in operator_names(graph))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_any_number_of_rows(device, step):
    """One graph, as long as the number of chunks is the same; and without gradients."""
    count = CompileCounterWithBackend("aot_eager")
    compiled, graphs = torch.compile(step, fullgraph=True, backend=count, dynamic=True), []
    for rows in (N, 28, 30):
        tensors = inputs(device, rows)
        torch.testing.assert_close(gradients(compiled, *tensors), gradients(step, *tensors))
        graphs.append(count.frame_count)
    assert graphs[0] == graphs[-1]
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), step(*tensors))


@pytest.mark.usefixtures("cpu_as_cuda")
@pytest.mark.parametrize(
    "step, in_place, functional, times",
    [
        (of_logits, "divergences_backward_", "divergences_backward", 1),
        (of_heads, "scale_grad_", "linear_scale_grad", 2),
        # These differ before Inductor.
        pytest.param(without_target, "scale_grad_", "linear_scale_grad", 2, marks=pytest.mark.slow),
        pytest.param(rows, "linear_divergences_backward", "linear_scale_grad", 1, marks=pytest.mark.slow),
    ],
    ids=lambda case: getattr(case, "__name__", None),
)
def test_by_inductor(device, step, in_place, functional, times):
    """The gradient is written over the logits; gradients that were made are scaled in place."""
    tensors = inputs(device)
    found, code = run_and_get_code(lambda: gradients(torch.compile(step, fullgraph=True), *tensors))
    torch.testing.assert_close(found, gradients(step, *tensors))
    code = "\n".join(code)
    assert calls_of(in_place, code) == times and calls_of(functional, code) == 0


def test_the_one_pass_runs_once(device):
    """Whatever else a memory budget has made again."""
    tensors, backend = inputs(device), Partitioned()

    def step(x, head, *rest):
        return of_heads(((x @ head.t()).sin() @ head).cos(), head, *rest)

    with config.patch(activation_memory_budget=0.3):
        made = gradients(torch.compile(step, fullgraph=True, backend=backend), *tensors)
    torch.testing.assert_close(made, gradients(step, *tensors))
    assert backend.calls(LINEAR) == [1, 0]


def test_refused_while_tracing(device):
    x, head, teacher, teacher_head, target = inputs(device)
    learned = teacher.clone().requires_grad_()
    with pytest.raises(Exception, match="teacher_input requires grad"):
        torch.compile(of_heads, fullgraph=True, backend="aot_eager")(x, head, learned, teacher_head, target)
