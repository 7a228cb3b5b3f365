"""One buffer of logits in a compiled training step: the code that Inductor writes, and its numbers."""

import re

import pytest
import torch
from helpers.graphs import calls_of, inductor_code, run_and_get_code

import xent_ops
from tools.bench.losses import opaque_inductor
from xent_ops.inductor.lowerings import reuse

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
IN_PLACE, FUNCTIONAL = "cross_entropy_backward_", "cross_entropy_backward"


def step_code(device, rows=64, dynamic=False, **options):
    """Inductor's code for h @ W.T -> loss -> backward with a vocabulary of 5008; the gradient is eager's.

    A multiple of 8: odd ones Inductor pads on CUDA, when its timing says so, with a copy of the gradient.
    """
    h = torch.randn(rows, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(5008, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 5008, (rows,), device=device)

    def function(h, target):
        return xent_ops.cross_entropy(h @ w.T, target)

    (wanted,) = torch.autograd.grad(function(h, target), h)
    if dynamic:
        torch._dynamo.mark_dynamic(h, 0)
        torch._dynamo.mark_dynamic(target, 0)
    code = inductor_code(torch.compile(function, fullgraph=True, **options), h, target)
    torch.testing.assert_close(h.grad, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())
    return code


def logits_sized(code):
    """Allocations of (rows, 5008) in generated code."""
    allocations = [line for line in code.splitlines() if " = empty_strided_" in line]
    return [line for line in allocations if ", 5008)" in line.split("),")[0] + ")"]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_buffer_of_logits(device, dynamic):
    """The gradient is written over the logits: one allocation of their size, reused, not cloned."""
    in_place = reuse.writes_over(device)
    if not in_place and TORCH < (2, 13):
        pytest.skip("Inductor of torch 2.11 computes a row mask apart on the CPU, and then reuses nothing")
    code = step_code(device, dynamic=dynamic)
    assert len(logits_sized(code)) == 1, logits_sized(code)
    assert calls_of("cross_entropy_reduced", code) == 1
    assert calls_of(FUNCTIONAL, code) == 0
    assert calls_of(IN_PLACE, code) == 1 if in_place else "mm; del mm  # reuse" in code
    assert "clone" not in code and "copy_(" not in code


def test_the_mean_divides_in_the_backward_kernel(device, cpu_as_cuda):
    """One launch between the upstream gradient and that of the logits; another where the divisor is not the mean's."""
    h = torch.randn(64, 16, device=device, requires_grad=True)
    w, target = torch.randn(96, 16, device=device), torch.randint(0, 96, (64,), device=device)
    weight = torch.rand(96, device=device)

    def launches(loss):
        """Inductor's own in the code of the backward, whose gradient must be eager's."""

        def step():
            return torch.autograd.grad(torch.compile(loss, fullgraph=True)(h @ w.T), h)

        result, (_, backward) = run_and_get_code(step)
        torch.testing.assert_close(result, torch.autograd.grad(loss(h @ w.T), h))
        return len(re.findall(r"^ +(?:cpp|triton)_\w+?(?:\(|\.run\()", backward, re.M))

    assert launches(lambda x: xent_ops.cross_entropy(x, target)) == 0
    assert launches(lambda x: xent_ops.cross_entropy(x, target, weight)) == 0
    assert launches(lambda x: xent_ops.cross_entropy(x, target, reduction="none").sum() / torch.tensor(3.0)) == 1
    assert launches(lambda x: (xent_ops.cross_entropy(x, target, reduction="none") / torch.tensor(3.0)).sum()) == 1
    assert launches(lambda x: xent_ops.cross_entropy(x, target) / 4) == 1


def test_a_divisor_that_is_written_to_after_the_division(device, cpu_as_cuda):
    """The operator comes later, and the kernel must not divide by what is there by then.

    An operator that is opaque to Inductor: it keeps a copy of what its own kernels overwrite.
    """

    @torch.library.custom_op("xent_test::hundredfold_", mutates_args=("out",))
    def hundredfold_(out: torch.Tensor, value: torch.Tensor) -> None:
        out.copy_(value * 100)

    x, target = torch.randn(8, 32, device=device), torch.randint(0, 32, (8,), device=device)
    lse = torch.ops.xent.cross_entropy_forward(x, target)[1]

    def function(grad, number):
        quotient = grad / number
        hundredfold_(number, quotient)
        return torch.ops.xent.cross_entropy_backward(quotient.expand(8), None, x, target, lse)

    def arguments():
        return torch.tensor(2.0, device=device), torch.tensor(4.0, device=device)

    result = torch.compile(function, fullgraph=True)(*arguments())
    torch.testing.assert_close(result, function(*arguments()))


@pytest.mark.skipif(TORCH < (2, 13), reason="Inductor of torch 2.11 then reuses nothing")
def test_without_a_kernel_of_ours_inductor_fuses_the_gradient(monkeypatch):
    monkeypatch.setattr(reuse, "DEVICES", {"cuda"})
    code = step_code("cpu")
    assert len(logits_sized(code)) == 1, logits_sized(code)
    assert "mm; del mm  # reuse" in code and "ops.xent.cross_entropy_backward" not in code


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_lowering_for_cuda(cpu_as_cuda, dynamic):
    code = step_code("cpu", dynamic=dynamic)
    assert len(logits_sized(code)) == 1, logits_sized(code)
    assert calls_of(IN_PLACE, code) == 1 and calls_of(FUNCTIONAL, code) == 0


def test_logits_that_live_on_are_not_overwritten(cpu_as_cuda):
    """Of four losses in a graph, the first alone is the last reader of its logits (it sees them through a view)."""
    h, w = (torch.randn(4, n, 16, requires_grad=True) for n in (5, 77))
    x = torch.randn(5, 77, requires_grad=True)
    target = torch.randint(0, 77, (5,))

    def function(h, w, x):
        dies, read_twice, returned = (h[n] @ w[n].T for n in range(3))
        losses = [
            xent_ops.cross_entropy(dies.view(1, 5, 77), target.unsqueeze(0), dim=-1),
            xent_ops.cross_entropy(read_twice, target) + read_twice.tanh().mean(),
            xent_ops.cross_entropy(returned, target),
            xent_ops.cross_entropy(x, target),  # an input of the graph
        ]
        return *losses, returned

    def with_gradients(function):
        *losses, logits = function(h, w, x)
        return *losses, logits, *torch.autograd.grad(sum(losses), (h, w, x))

    mine, code = run_and_get_code(with_gradients, torch.compile(function, fullgraph=True))
    code = "\n".join(code)
    assert (calls_of(IN_PLACE, code), calls_of(FUNCTIONAL, code)) == (1, 3)
    torch.testing.assert_close(mine, with_gradients(function))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_opaque_backward_needs_two(device, dynamic):
    """That the tests above can fail, and that the benchmark compares with what it says."""
    code = step_code(device, dynamic=dynamic, backend=opaque_inductor)
    assert calls_of(FUNCTIONAL, code) == 1 and calls_of(IN_PLACE, code) == 0 and "mm; del mm  # reuse" not in code
    torch.compiler.reset()
    assert calls_of(FUNCTIONAL, step_code(device, dynamic=dynamic)) == 0, "and all is as before"


def test_an_opaque_backward_is_compiled_with_its_forward(device):
    """Later it would come from the compile caches, which may have one that writes over the logits."""
    x = torch.randn(4, 9, device=device, requires_grad=True)
    loss = torch.compile(xent_ops.cross_entropy, backend=opaque_inductor)
    _, code = run_and_get_code(loss, x, torch.arange(4, device=device))
    assert calls_of(FUNCTIONAL, "\n".join(code)) == 1


def test_with_grad_overwrites_a_product(cpu_as_cuda):
    """A direct call in a graph is one node; the gradient takes the logits' place where nothing else reads them."""
    h, w, target = torch.randn(8, 16), torch.randn(16, 33), torch.arange(8)

    def with_grad(logits, target):
        scale = 1 / (target != -100).sum().float()
        loss, lse, *_, grad = torch.ops.xent.cross_entropy_with_grad(logits, target, scale)
        return loss.sum() * scale, lse, grad.view(8, 33) @ w.T

    def product(h):
        return with_grad(h @ w, target)

    def batched(h):
        return with_grad((h @ w).view(2, 4, 33), target.view(2, 4))

    def read_again(h):
        logits = h @ w
        return *with_grad(logits, target), logits.argmax(-1)

    def an_input(h):
        return with_grad(h, target)

    for function, argument, reused in [(product, h, 1), (batched, h, 1), (read_again, h, 0), (an_input, h @ w, 0)]:
        before = argument.clone()
        results, code = run_and_get_code(torch.compile(function, fullgraph=True), argument)
        for mine, other in zip(results, function(argument), strict=True):
            torch.testing.assert_close(mine, other)
        assert calls_of("cross_entropy_with_grad_", "".join(code)) == reused, function.__name__
        assert torch.equal(argument, before)
