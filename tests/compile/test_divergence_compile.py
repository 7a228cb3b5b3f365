"""Compiled and exported losses of a user's function of a token's divergences: what eager computes, in one graph."""

import re

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs import run_and_get_code
from torch._dynamo.testing import CompileCounterWithBackend

import xent_ops

N, H, G, V, T = 7, 8, 6, 19, 40


def blend(d, weight):
    share = (-3.0 * d.overlap.detach()).exp()
    return weight * (share * d.kl + (1 - share) * (1 - d.overlap)) - d.overlap.clamp(min=1e-6).log() + d.agrees


def inputs(device, rows=N, classes=False):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*size, generator=g).to(device).requires_grad_() for size in ((rows, H), (V, H)))
    y, u = (torch.randn(*size, generator=g).to(device) for size in ((rows, G), (T if classes else V, G)))
    ids = torch.arange(0, 2 * V, 2, device=device) if classes else None
    return x, w, y, u, torch.rand(rows, generator=g).to(device), ids


def of_heads(x, w, y, u, weight, ids):
    return xent_ops.linear_distillation_token_loss(x, w, y, u, blend, rows=(weight,), classes=ids, chunk_rows=3)


def of_logits(x, w, y, u, weight, ids):
    z, of_teacher = F.linear(x, w), F.linear(y, u)
    return xent_ops.distillation_token_loss(z, of_teacher, blend, rows=(weight,), classes=ids)


def gradients(step, tensors):
    loss = step(*tensors)
    return loss.detach(), *torch.autograd.grad(loss, tensors[:2])


@pytest.mark.parametrize(
    "step, classes",
    [
        pytest.param(of_heads, False, id="of_heads-all classes"),
        pytest.param(of_heads, True, id="of_heads-draft vocabulary", marks=pytest.mark.slow),  # test_inductor has it
        pytest.param(of_logits, False, id="of_logits-all classes"),
        pytest.param(of_logits, True, id="of_logits-draft vocabulary"),
    ],
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph(device, backend, step, classes):
    tensors = inputs(device, classes=classes)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    torch.testing.assert_close(gradients(compiled, tensors), gradients(step, tensors))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), step(*tensors))


def test_inductor(device):
    """One of the above, that make test runs too. Each chunk reads ``classes``: it must not be one kernel for all."""
    tensors = inputs(device, rows=9, classes=True)
    compiled = torch.compile(of_heads, fullgraph=True)
    made, code = run_and_get_code(gradients, compiled, tensors)
    torch.testing.assert_close(made, gradients(of_heads, tensors))
    names = "linear_logits|divergences_forward|divergences_backward_|linear_grad_input"
    steps = re.findall(rf"(?:xent\.|OPERATORS\[')({names})(?:\.default\(|'\])", "".join(code))
    assert steps == ["linear_logits", *names.split("|")] * 3, steps


def test_any_number_of_rows(device):
    """As long as the number of chunks is the same."""
    count = CompileCounterWithBackend("aot_eager")

    def whole(*tensors):
        x, w, y, u, weight, ids = tensors
        return xent_ops.linear_distillation_token_loss(x, w, y, u, blend, rows=(weight,), classes=ids)

    compiled = torch.compile(whole, fullgraph=True, backend=count)
    for rows in (6, 11, 30):
        tensors = inputs(device, rows, True)
        for tensor in (tensors[0], tensors[2], tensors[4]):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(gradients(compiled, tensors), gradients(whole, tensors))
    assert count.frame_count == 1


def test_wrong_classes_give_nan(device):
    """Equal ones, and those that the teacher lacks. Of given logits also on a CPU, where the operator of heads raises when it runs."""
    *tensors, ids = inputs(device, classes=True)
    compiled = torch.compile(of_logits, fullgraph=True, backend="aot_eager")
    for wrong in (torch.zeros_like(ids), ids + 10**6, -ids - 1):
        loss, *grads = gradients(compiled, (*tensors, wrong))
        assert loss.isnan() and all(grad.isnan().all() for grad in grads)


def test_refused_while_tracing_as_in_eager(device):
    x, w, y, u, weight, ids = inputs(device)
    for refusing in (of_heads, torch.compile(of_heads, fullgraph=True, backend="eager")):
        with pytest.raises(Exception, match=r"teacher_input has shape \(3, 6\); expected \(7, 6\), the rows of input"):
            refusing(x, w, y[:3], u, weight, ids)


@pytest.mark.parametrize("step", [of_heads, of_logits])
def test_exported(device, step):
    """As core aten, without an operator of ours."""
    _, w, y, u, weight, ids = inputs(device, classes=True)

    class Model(torch.nn.Module):
        def forward(self, x):
            return step(x, w.detach(), y, u, weight, ids)

    x = inputs(device)[0].detach()
    program = torch.export.export(Model(), (x,)).run_decompositions(xent_ops.decompositions())
    assert not [node for node in program.graph.nodes if "xent" in str(node.target)]
    torch.testing.assert_close(program.module()(x), step(x, w.detach(), y, u, weight, ids))


@pytest.mark.slow
@pytest.mark.parametrize("classes", [False, True], ids=["all classes", "draft vocabulary"])
@pytest.mark.parametrize("step", [of_heads, of_logits])
def test_package_of_aotinductor(tmp_path, aoti_packages, device, step, classes):
    class Loss(torch.nn.Module):
        def forward(self, *tensors):
            return step(*tensors)

    tensors = [None if one is None else one.detach() for one in inputs(device, classes=classes)]
    program = torch.export.export(Loss(), tuple(tensors))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(*tensors), step(*tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [False, True], ids=["all classes", "draft vocabulary"])
def test_a_cuda_graph_replays_with_other_numbers(classes):
    tensors = inputs("cuda", classes=classes)
    x, _, y, *_ = tensors
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            gradients(of_heads, tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(of_heads, tensors)
    with torch.no_grad():
        x.normal_(), y.normal_()
    graph.replay()
    torch.testing.assert_close(captured, gradients(of_heads, tensors))


def test_numbers_that_change_are_symbols(device):
    """Dynamo traces a second value of a float as a symbol, which the checks of all options take."""
    x, w, y, u, weight, _ = inputs(device)
    target = torch.arange(N, device=device)

    def token(temperature, scale):
        options = {"temperature": temperature, "logit_scale": scale, "target": target}
        return xent_ops.linear_distillation_token_loss(x, w, y, u, blend, rows=(weight,), **options)

    def of_given_logits(temperature, scale):
        return xent_ops.distillation_token_loss(
            x @ w.t(), y @ u.t(), blend, rows=(weight,), temperature=temperature, logit_scale=scale, target=target
        )

    def fixed(temperature, hard_weight):
        options = {"temperature": temperature, "hard_weight": hard_weight, "target": target}
        return xent_ops.linear_distillation_loss(x, w, y, u, **options)

    for step in (token, of_given_logits, fixed):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for numbers in ((1.5, 0.5), (2.0, 0.75)):
            torch.testing.assert_close(compiled(*numbers), step(*numbers))
