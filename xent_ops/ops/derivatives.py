"""The derivatives of a user's function inside of a forward, by autograd on leaves, in eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._private import private

# Dynamo records these two, with which torch.func.grad is made, as nodes that AOTAutograd caches. It has no
# Tensor.requires_grad_ of values that leave the graph, nor torch.autograd.grad without a setting.
_require_grad = private(
    "torch._functorch.eager_transforms._set_tensor_requires_grad",
    Tensor.requires_grad_,
    "a compiled loss of a user's function needs torch._dynamo.config.trace_autograd_ops",
)
_autograd_grad = private(
    "torch._functorch.eager_transforms._autograd_grad",
    lambda outputs, inputs, grad_outputs, create_graph: torch.autograd.grad(outputs, inputs, grad_outputs),
    "a compiled loss of a user's function needs torch._dynamo.config.trace_autograd_ops",
)


def value_and_derivatives(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], factor: Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """``function(*inputs)``, and the derivative of its sum times ``factor`` () for each of the inputs.

    The derivative for an input that it does not read is None in eager, zeros in a graph.

    Not torch.func.grad: it refuses saved-tensor hooks, with which torch 2.13 traces a checkpoint, and every later hook
    of the process is then refused. In eager, it launches twice the kernels.
    """
    leaves = [_require_grad(tensor.detach()) for tensor in inputs]
    with torch.enable_grad():
        value = function(*leaves)
    grad_value = factor.expand(value.shape)
    if torch.compiler.is_compiling():
        return value.detach(), _autograd_grad((value,), tuple(leaves), (grad_value,), create_graph=False)
    if not value.requires_grad:
        return value, [None] * len(leaves)
    return value.detach(), torch.autograd.grad(value, leaves, grad_value, allow_unused=True)
