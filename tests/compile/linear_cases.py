"""Losses, inputs and counters of the tests of the head and the loss as one (test_linear*.py)."""

import torch
from functorch.compile import make_boxed_func
from helpers.graphs import calls_of, operator_names, run_and_get_code
from torch._dynamo.backends.common import aot_autograd

import xent_ops

N, H, V = 48, 16, 40
ONE_PASS, ROWS = "linear_cross_entropy_with_grad", "linear_cross_entropy_forward"
AGAIN = "linear_cross_entropy_backward"
IN_PLACE, SCALED = "scale_grad_", "linear_scale_grad"


def inputs(dtype=torch.float32, device="cpu", rows=N, wanted=(True, True, True)):
    """(input, linear_weight, linear_bias, target); a fourth of the targets is ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, H), (V, H), (V,))
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    target = torch.randint(0, V, (rows,), generator=generator).to(device)
    target[1::4] = -100
    return *(tensor.requires_grad_(grad) for tensor, grad in zip(made, wanted, strict=True)), target


def loss(x, w, b, target, **options):
    return xent_ops.linear_cross_entropy(x, w, target, linear_bias=b, **options)


def gradients(function, tensors):
    """(the results, the gradients of the leaves for an upstream gradient of 3)."""
    value = function(*tensors)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return value.detach(), torch.autograd.grad(value.sum() * 3.0, leaves)


def code_of(function, *tensors):
    """All of Inductor's code for a function and its backward, whose gradients are those of the function itself."""
    wanted = gradients(function, tensors)
    compiled = torch.compile(function, fullgraph=True)
    made, code = run_and_get_code(lambda: gradients(compiled, tensors))
    torch.testing.assert_close(made, wanted)
    return "\n".join(code), compiled


def counts(code, *names):
    return tuple(calls_of(name, code) for name in names)


class Partitioned:
    """A backend for torch.compile: Inductor's joint-graph passes and partitioner, then eager. Keeps the graphs."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm, example_inputs):
        from torch._inductor.compile_fx import partition_fn

        compile_ = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep, partition_fn=partition_fn)
        return compile_(gm, example_inputs)

    def _keep(self, gm, example_inputs):
        self.graphs.append(gm)
        return make_boxed_func(gm.forward)

    def calls(self, name):
        """How often each graph calls an operator: forward, backward."""
        return [operator_names(gm).count(f"xent.{name}.default") for gm in self.graphs]
