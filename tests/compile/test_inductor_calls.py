"""Inductor's code calls our operators, with what the schema declares."""

import re

import pytest
import torch
from helpers.graphs import AotEagerAndRecordGraphs, run_and_get_code

import xent_ops
from xent_ops.ops.library import OPERATORS

ops = torch.ops.xent


def entropy(x, t):
    loss, lse, _, entropy, _ = ops.cross_entropy_forward(x, t, with_entropy=True)
    return loss.sum() + lse.sum() + entropy.sum()


def with_grad(x, t):
    scale = torch.ones((), device=x.device)
    return ops.cross_entropy_with_grad(x.detach() * 2, t, scale)[-1].square().sum() + x.sum()


STEPS = {
    "mean": (lambda x, t: xent_ops.cross_entropy(x, t), {"reduced", "backward"}),
    "outputs": (lambda x, t: xent_ops.cross_entropy_outputs(x, t).loss, {"forward", "backward"}),
    "entropy": (entropy, {"forward", "backward"}),
    "one pass": (with_grad, {"with_grad"}),
}


@pytest.mark.parametrize("step, expected", STEPS.values(), ids=STEPS)
def test_operators_are_called_once(device, step, expected, cpu_as_cuda):
    x = torch.randn(6, 40, device=device, requires_grad=True)
    target = torch.tensor([0, 39, -100, 7, 8, 9], device=device)
    (wanted,) = torch.autograd.grad(step(x, target), x)

    def run():
        return torch.autograd.grad(torch.compile(step, fullgraph=True)(x, target), x)

    (grad,), code = run_and_get_code(run)
    torch.testing.assert_close(grad, wanted)
    called = re.findall(r"torch\.ops\.xent\.(\w+)\.default\(|OPERATORS\['(\w+)'\]\.on_triton\(", "\n".join(code))
    called = [operator or kernel for operator, kernel in called]
    assert sorted(called) == sorted(f"cross_entropy_{name}" for name in expected)


def test_operators_inside_an_operator_are_called_below_autograd(monkeypatch):
    """Inductor's code for CUDA calls on_triton. torch's Python autograd takes 80 us for each operator with a formula."""
    x, weight = torch.randn(6, 4), torch.randn(9, 4)
    operator, seen = OPERATORS["linear_cross_entropy_with_grad"], []
    kernel, key = operator.reference, torch._C.DispatchKey.AutogradFunctionality

    def reference(*args, **options):
        seen.append(torch._C._dispatch_tls_is_dispatch_key_excluded(key))
        return kernel(*args, **options)

    monkeypatch.setattr(operator, "reference", reference)
    operator.on_triton(x, weight, torch.arange(6))
    assert seen == [True] and not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("grad", [False, True])
def test_graphs_hold_options_as_the_schema_declares_them(grad, dynamic):
    """The dispatcher has made floats of integers before Inductor gets a graph, so that no lowering has to."""
    x = torch.randn(6, 40, requires_grad=grad)
    target = torch.arange(6)
    options = {"label_smoothing": 1, "logit_scale": 2}
    steps = [
        lambda x, cap: ops.cross_entropy_forward(x, target, softcap=cap, **options)[0].sum(),
        lambda x, cap: ops.cross_entropy(x, target, softcap=cap, **options),
        lambda x, cap: xent_ops.cross_entropy(x, target, softcap=cap, **options),
    ]
    for step in steps:
        recorded = AotEagerAndRecordGraphs()
        loss = torch.compile(step, backend=recorded, fullgraph=True, dynamic=dynamic)(x, 5)
        if grad:
            loss.backward()
        graphs = [*recorded.fw_graphs, *recorded.bw_graphs]
        _check_options(graphs, 2 if grad else 1)
        torch.compiler.reset()


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_options_as_the_schema_declares_them(strict):
    class Loss(torch.nn.Module):
        def forward(self, x, target):
            return ops.cross_entropy_forward(x, target, label_smoothing=1, softcap=5, logit_scale=2)

    program = torch.export.export(Loss(), (torch.randn(6, 40), torch.arange(6)), strict=strict)
    _check_options([program.graph_module, program.run_decompositions().graph_module], 2)


def _check_options(graphs, number):
    calls = [node for graph in graphs for node in graph.graph.nodes if str(node.target).startswith("xent.")]
    assert len(calls) == number
    for call in calls:
        types = {name: type(value) for name, value in call.kwargs.items()}
        assert types == {"label_smoothing": float, "softcap": float, "logit_scale": float}, call.format_node()


@pytest.mark.slow
def test_cpp_code_calls_the_operators():
    """By the dispatcher, with integers as the floats of the schema; compiles a C++ program."""
    x, target = torch.randn(6, 40, requires_grad=True), torch.arange(6)

    def loss(x):
        return xent_ops.cross_entropy(x * 2, target, softcap=5)

    def run():
        return torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), x)

    with torch._inductor.config.patch(cpp_wrapper=True):
        (grad,), code = run_and_get_code(run)
    torch.testing.assert_close(grad, torch.autograd.grad(loss(x), x)[0])
    assert "xent::cross_entropy_reduced" in code[0]
