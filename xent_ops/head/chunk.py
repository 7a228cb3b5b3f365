"""What the operators of one chunk of rows compute for loop.py: ops/linear/chunk.py. They know no loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.rows import first_columns, front_of, padded_classes
from .float16 import times
from .packing import part_of
from .products import add_product, add_rows, counting_kernels, gradient_in, logits_of, write_product, zero_behind


def linear_logits(
    input: Tensor,
    head: Tensor,
    bias: Tensor | None = None,
    count: Tensor | None = None,
    after: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """(rows, padded_classes)."""
    columns, dtype = head.shape[0], logits_dtype or input.dtype
    kernels = None if count is None else counting_kernels(input, head)
    new = input.new_empty if kernels is None else input.new_zeros
    made = new((input.shape[0], padded_classes(columns, dtype)), dtype=dtype)
    class_logits = first_columns(made, columns)
    if kernels is None:
        logits_of(input, head, bias, class_logits)
    else:
        kernels.logits(input, head, bias, count, class_logits)
    if class_logits is not made:
        made[:, columns:].zero_()  # an operator must not return memory that nobody wrote
    return made


def linear_grad_input(
    logits: Tensor,
    head: Tensor,
    with_grad_input: bool = True,
    count: Tensor | None = None,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """From the gradient that was written over a chunk's logits, in the dtype of the head; (0,) if it is not wanted."""
    dtype, done = None if logits.dtype == head.dtype else head.dtype, head.new_empty(0)
    grad_logits = gradient_in(first_columns(logits, head.shape[0]), dtype)
    if not with_grad_input:
        return head.new_empty(0), done
    shape = (logits.shape[0], head.shape[1])
    kernels = None if count is None else counting_kernels(head.new_empty(()).expand(shape), head)
    if kernels is None:
        return write_product(grad_logits, head), done
    assert count is not None
    grad = head.new_zeros(shape)
    kernels.grad_input(grad_logits, head, count, torch.arange(shape[0], device=logits.device), grad)
    return grad, done


def linear_cross_entropy_chunk_add_(
    grad_linear_weight: Tensor,
    grad_linear_bias: Tensor,
    grad_logits: Tensor,
    input: Tensor,
    columns: int,
    first: bool,
    count: Tensor | None = None,
    shares: Tensor | None = None,
) -> None:
    """A gradient of shape (0,) is not wanted. With ``first`` the sums start at zero. ``shares``: factors of rows."""
    class_grads = front_of(first_columns(grad_logits, columns), input.dtype)
    if grad_linear_weight.dim() == 2:
        class_total, input = part_of(grad_linear_weight, slice(0, columns)), times(input, shares)
        kernels = None if count is None else counting_kernels(input, class_total)
        if kernels is None:
            add_product(class_total, class_grads.t(), input, first)
        else:
            kernels.grad_weight(class_grads, input, count, class_total, add=not first)
    if grad_linear_bias.numel() > 0:
        add_rows(part_of(grad_linear_bias, slice(0, columns)), class_grads, first, shares)
    if first:
        zero_behind(grad_linear_weight, grad_linear_bias, columns)
