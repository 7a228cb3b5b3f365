"""Inductor's code calls our operators, with what the schema declares."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import xent_ops

ops = torch.ops.xent


def entropy(x, t):
    loss, lse, entropy = ops.cross_entropy_forward_entropy(x, t)
    return loss.sum() + lse.sum() + entropy.sum()


def one_pass(x, t):
    scale = torch.ones((), device=x.device)
    return ops.cross_entropy_with_grad(x.detach() * 2, t, scale)[2].square().sum() + x.sum()


STEPS = {
    "mean": (lambda x, t: xent_ops.cross_entropy(x, t), {"reduced", "backward"}),
    "outputs": (lambda x, t: xent_ops.cross_entropy_outputs(x, t).loss, {"forward_argmax", "backward"}),
    "entropy": (entropy, {"forward_entropy", "backward_entropy"}),
    "one pass": (one_pass, {"with_grad"}),
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
    called = re.findall(r"torch\.ops\.xent\.(\w+)\.default\(", "\n".join(code))
    assert sorted(called) == sorted(f"cross_entropy_{name}" for name in expected)


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
