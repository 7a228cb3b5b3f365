"""Operators of one chunk of rows of a head split over ranks, between which the caller's collectives stand.

The loop is distributed/pipelined.py's. The logits of a chunk live from the first operator to the third::

    linear_cross_entropy_shard_chunk        a chunk's logits, what cross_entropy_shard returns for them
    linear_cross_entropy_shard_chunk_grad_  from all ranks' statistics: losses, the gradient written over the logits,
                                            this rank's part of the input's gradient
    linear_cross_entropy_shard_chunk_add_   the chunk's part of the weight's and the bias' gradient
    linear_cross_entropy_shard_value        the loss, whose derivatives are the gradients made
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import reference, reference_shard
from ...kernels.options import DEFAULTS, Options
from ...kernels.reference_shard import columns_of
from .. import checks as row_checks
from .. import transforms
from ..library import Outputs, autograd, operator
from ..shard import check_gathered, no_second_derivative
from . import checks, chunks
from .products import add_product
from .shard import check_shard
from .sizes import padded_classes

_ops = torch.ops.xent


def _of_classes(tensor: Tensor | None, columns: int) -> Tensor | None:
    return None if tensor is None else tensor[:columns]


def _check_chunk(input: Tensor, *args: Any, **options: Any) -> None:
    _two_dimensions(input)
    check_shard(input, *args, **options)


def _two_dimensions(input: Tensor) -> None:
    if input.dim() != 2:
        raise ValueError(f"input has shape {tuple(input.shape)}; expected (rows, H), the rows of one chunk")


def _chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    options: Options = DEFAULTS,
) -> tuple[Tensor, Tensor]:
    columns = columns_of(linear_weight.shape[0], class_start, num_classes)
    logits = input.new_empty(_logits_shape(input, linear_weight, class_start, num_classes))
    of_classes, head, bias = logits[:, :columns], linear_weight[:columns].t(), _of_classes(linear_bias, columns)
    logits[:, columns:].zero_()
    torch.mm(input, head, out=of_classes) if bias is None else torch.addmm(bias, input, head, out=of_classes)
    shard = (class_start, num_classes, _of_classes(weight, columns))
    return _ops.cross_entropy_shard(of_classes, target, *shard, **options.keywords()), logits


def _logits_shape(input: Tensor, linear_weight: Tensor, class_start: int, num_classes: int) -> tuple[int, int]:
    return input.shape[0], padded_classes(columns_of(linear_weight.shape[0], class_start, num_classes), input.dtype)


def _chunk_outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    _linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
) -> Outputs:
    width = reference_shard.width(target.numel(), weight is not None)
    logits = _logits_shape(input, linear_weight, class_start, num_classes)
    return ((1, width), reference.accumulator(input)), (logits, input.dtype)


def _check_grad(
    logits: Tensor,
    gathered: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    after: Tensor | None = None,
    with_grad_input: bool = True,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> None:
    row_checks.shard_range(linear_weight.shape[0], class_start, num_classes)
    columns = columns_of(linear_weight.shape[0], class_start, num_classes)
    expected = torch.Size((target.shape[0], padded_classes(columns, logits.dtype)))
    row_checks.same_shape("logits", logits.shape, expected, "as linear_cross_entropy_shard_chunk makes them")
    row_checks.shard(
        logits[:, :columns], target, class_start, num_classes, _of_classes(weight, columns), options=options
    )
    check_gathered(gathered, logits, target, weight)
    row_checks.divisor(divisor, logits)


def _grad_(
    logits: Tensor,
    gathered: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    after: Tensor | None = None,
    with_grad_input: bool = True,
    *,
    options: Options = DEFAULTS,
    lse_square_scale: float = 0.0,
) -> tuple[Tensor, ...]:
    """``after`` is not read: it keeps the next chunk's product in front of this, whatever reorders a graph."""
    columns, keywords = columns_of(linear_weight.shape[0], class_start, num_classes), options.keywords()
    of_classes, weight = logits[:, :columns], _of_classes(weight, columns)
    shard = (class_start, num_classes, weight)
    loss, lse, target_weight, coefficient = _ops.cross_entropy_shard_join(
        of_classes, target, gathered, *shard, **keywords
    )
    rest = (*shard, None if weight is None else coefficient, divisor)
    _ops.cross_entropy_shard_backward_(
        lse.new_ones(()), None, of_classes, target, lse, *rest, lse_square_scale=lse_square_scale, **keywords
    )
    grad_input = torch.mm(of_classes, linear_weight[:columns]) if with_grad_input else logits.new_empty(0)
    return loss, lse, target_weight, grad_input


def _grad_outputs(logits: Tensor, _gathered: Tensor, linear_weight: Tensor, target: Tensor, *rest: Any) -> Outputs:
    of_rows = (target.shape, reference.accumulator(logits))
    wanted = len(rest) < 6 or rest[5]
    return of_rows, of_rows, of_rows, ((*target.shape, linear_weight.shape[1]) if wanted else (0,), logits.dtype)


def _check_add(
    grad_linear_weight: Tensor,
    grad_linear_bias: Tensor,
    grad_logits: Tensor,
    input: Tensor,
    columns: int,
    first: bool,
) -> None:
    _two_dimensions(input)
    row_checks.same_shape("grad_logits", grad_logits.shape[:1], input.shape[:1], "as many rows as the input")
    torch._check_value(
        padded_classes(columns, input.dtype) == grad_logits.shape[1],
        lambda: f"grad_logits has shape {tuple(grad_logits.shape)}, which {columns} classes do not have",
    )


def _add_(
    grad_linear_weight: Tensor,
    grad_linear_bias: Tensor,
    grad_logits: Tensor,
    input: Tensor,
    columns: int,
    first: bool,
) -> None:
    """A gradient of shape (0,) is not wanted. ``first``: what is there counts for nothing."""
    of_classes = grad_logits[:, :columns]
    if grad_linear_weight.dim() == 2:
        add_product(grad_linear_weight[:columns], of_classes.t(), input, first)
    if grad_linear_bias.numel() > 0:
        total = of_classes.sum(0, dtype=grad_linear_bias.dtype)
        grad_linear_bias[:columns] = total if first else grad_linear_bias[:columns] + total
    if first and grad_linear_weight.dim() == 2:
        grad_linear_weight[columns:].zero_()
    if first:
        grad_linear_bias[columns:].zero_()


def _value(
    value: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    grad_input: Tensor,
    grad_linear_weight: Tensor,
    grad_linear_bias: Tensor,
    divisor: Tensor | None = None,
) -> Tensor:
    return value.clone()


def _check_value(value: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, *rest: Any) -> None:
    checks.head(input, linear_weight, linear_bias, may_be_empty=True)
    for name, tensor, made in zip(
        ("input", "linear_weight", "linear_bias"), (input, linear_weight, linear_bias), rest, strict=False
    ):
        if tensor is not None and made.dim() == tensor.dim() and made.shape != (0,):
            row_checks.same_shape(f"grad_{name}", made.shape, tensor.shape, f"the gradient of {name}")


def _save_value(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, grad_input, grad_weight, grad_bias, divisor = inputs
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[1].dtype
    # Attributes, not saved tensors: the first backward scales the gradients in place and gives them away.
    ctx.gradients, ctx.divisor = (grad_input, grad_weight, grad_bias), divisor


def _value_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    if torch.is_grad_enabled():  # create_graph=True
        no_second_derivative()
    if ctx.gradients is None:
        raise RuntimeError(
            "the gradients of this loss were given away by its first backward, which did not ask for retain_graph=True"
        )
    gradients, factor = ctx.gradients, grad if ctx.divisor is None else grad / ctx.divisor
    # Compiled autograd traces this, and replays no change of ctx: there the gradients stay as they are.
    traced = torch.compiler.is_compiling()
    keep = traced or transforms.is_batch(grad) or torch._C._autograd._get_current_graph_task_keep_graph()
    if not keep:
        ctx.gradients = None
    scaled: list[Tensor | None] = []
    for gradient, wanted in zip(gradients, ctx.needs_input_grad[1:4], strict=True):
        if not wanted:
            scaled.append(None)
            continue
        if not keep and type(gradient) is Tensor:
            _ops.scale_grad_(gradient, factor)
        else:
            gradient = _ops.linear_scale_grad(gradient, factor)
        scaled.append(gradient.to(ctx.dtype))
    return None, *scaled, *(None,) * 4


def float16_divisor(dtype: torch.dtype, divisors: Tensor) -> tuple[Tensor, Tensor | None]:
    """(what the gradients of a chunk are divided by, and what their sums are): see chunks.py."""
    if dtype != torch.float16:
        return divisors, None
    later = chunks.divisor_after_products(divisors)
    return divisors / later, later


def memory_for_gradients(linear_weight: Tensor, wanted: Sequence[bool], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For the sums over chunks, of the weight's in this dtype: not initialised, (0,) where a gradient is not wanted."""
    shape, of_bias = linear_weight.shape, reference.accumulator(linear_weight)
    return (
        linear_weight.new_empty(shape if wanted[1] else (0,), dtype=dtype),
        linear_weight.new_empty(shape[:1] if wanted[2] else (0,), dtype=of_bias),
    )


operator(
    "linear_cross_entropy_shard_chunk", check=_check_chunk, outputs=_chunk_outputs, reference=_chunk, composed=True
)
operator(
    "linear_cross_entropy_shard_chunk_grad_",
    check=_check_grad,
    outputs=_grad_outputs,
    reference=_grad_,
    composed=True,
    overwrites="logits",
)
operator(
    "linear_cross_entropy_shard_chunk_add_",
    check=_check_add,
    outputs=lambda *_: (),
    reference=_add_,
    composed=True,
    overwrites="grad_linear_weight",
)
operator(
    "linear_cross_entropy_shard_value",
    check=_check_value,
    outputs=lambda value, *_: ((value.shape, value.dtype),),
    reference=_value,
    composed=True,
)
autograd("linear_cross_entropy_shard_value", _value_backward, _save_value)
