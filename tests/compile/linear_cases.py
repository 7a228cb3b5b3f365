"""Losses, inputs and counters of the tests of the head and the loss as one (test_linear*.py)."""

import torch
from helpers.graphs import calls_of, run_and_get_code
from helpers.heads import random_head

import xent_ops

N, H, V = 48, 16, 40
ONE_PASS, ROWS = "linear_cross_entropy_with_grad", "linear_cross_entropy_forward"
AGAIN = "linear_cross_entropy_backward"
IN_PLACE, SCALED = "scale_grad_", "linear_scale_grad"


def inputs(dtype=torch.float32, device="cpu", rows=N, wanted=(True, True, True)):
    """(input, linear_weight, linear_bias, target); a fourth of the targets is ignored."""
    *leaves, target = random_head(device, dtype, (rows,), V, H)
    return *(leaf.requires_grad_(grad) for leaf, grad in zip(leaves, wanted, strict=True)), target


def loss(x, w, b, target, **options):
    return xent_ops.linear_cross_entropy(x, w, target, linear_bias=b, **options)


def gradients(function, tensors):
    """(the results, the gradients of the leaves for an upstream gradient of 3)."""
    value, *more = made if isinstance(made := function(*tensors), tuple) else (made,)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return value.detach(), *more, torch.autograd.grad(value.sum() * 3.0, leaves)


def code_of(function, *tensors):
    """All of Inductor's code for a function and its backward, whose gradients are those of the function itself."""
    wanted = gradients(function, tensors)
    compiled = torch.compile(function, fullgraph=True)
    made, code = run_and_get_code(lambda: gradients(compiled, tensors))
    torch.testing.assert_close(made, wanted)
    return "\n".join(code), compiled


def counts(code, *names):
    return tuple(calls_of(name, code) for name in names)
