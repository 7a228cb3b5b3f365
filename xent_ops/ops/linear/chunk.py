"""Operators of one chunk of rows of a head, or of a rank's slice of one, between which the caller's code stands.

The loop is head/loop.py's. The logits of a chunk live from the first operator to the third::

    linear_cross_entropy_chunk        a chunk's logits and their statistics: (loss, lse), with entropies (loss, lse,
                                      entropy), (2, n) or (3, n); of a slice what cross_entropy_shard returns; after
                                      them x of the ids, (K, n)
    linear_cross_entropy_chunk_grad_  from the coefficients of rows: the gradient, written over the logits, and the
                                      input's gradient, of a slice this rank's part of it
    linear_cross_entropy_chunk_add_   the chunk's part of the weight's and the bias' gradient
    linear_cross_entropy_value        the loss, whose derivatives are the gradients made
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...head import shard
from ...head.sizes import padded_classes
from ...kernels import reference
from ...kernels.options import DEFAULTS, Options
from ...kernels.reference import columns_of
from .. import backward_checks, transforms
from .. import checks as row_checks
from ..library import Outputs, autograd, operator
from ..second_order import no_second_derivative
from ..token_logits import check_ids, check_places, check_values
from . import checks
from .operators import given_away


def _check_chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int = 0,
    num_classes: int | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    entropy: bool = False,
    count: Tensor | None = None,
    after: Tensor | None = None,
    ids: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    checks.two_dimensions(input)
    checks.wider(logits_dtype, input)
    _check_count(count, input)
    if ids is not None:
        check_ids(ids, "input", target.shape, input, linear_weight.t(), options.get("options", DEFAULTS))
    if num_classes is None:
        checks.rows(input, linear_weight, target, linear_bias, weight, **options)
    else:
        checks.shard(input, linear_weight, target, class_start, num_classes, linear_bias, weight, entropy, **options)


def _check_count(count: Tensor | None, like: Tensor) -> None:
    if count is not None:
        row_checks.dtype("count", count, (torch.int32,))
        row_checks.same_shape("count", count.shape, torch.Size(()), "one number")
        row_checks.same_device("count", count, like, "the chunk is")


def _chunk_outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int = 0,
    num_classes: int | None = None,
    _linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    entropy: bool = False,
    _count: Tensor | None = None,
    _after: Tensor | None = None,
    ids: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Outputs:
    rows, places = target.numel(), 0 if ids is None else ids.shape[1]
    stats = ((3 if entropy else 2) + places, rows)
    if num_classes is not None:
        stats = (1, shard.width(rows, weight is not None, entropy, places))
    columns = columns_of(linear_weight.shape[0], class_start, num_classes)
    dtype = logits_dtype or input.dtype
    return (stats, reference.accumulator(input)), ((rows, padded_classes(columns, dtype)), dtype)


def _check_grad(
    logits: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    linear_weight: Tensor,
    target: Tensor,
    lse: Tensor,
    class_start: int = 0,
    num_classes: int | None = None,
    weight: Tensor | None = None,
    divisor: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    coefficient: Tensor | None = None,
    with_grad_input: bool = True,
    count: Tensor | None = None,
    after: Tensor | None = None,
    ids: Tensor | None = None,
    at_ids: Tensor | None = None,
    grad_ids: Tensor | None = None,
    **options: Any,
) -> None:
    _check_count(count, logits)
    if ids is not None and at_ids is not None and grad_ids is not None:
        check_ids(ids, "logits", target.shape, logits, linear_weight.t(), options.get("options", DEFAULTS))
        check_places(ids, at_ids=at_ids, grad_ids=grad_ids)
    elif not (ids is None and at_ids is None and grad_ids is None):
        raise ValueError("ids, at_ids and grad_ids go together: expected all of them or none")
    if num_classes is not None:
        row_checks.shard_range(linear_weight.shape[0], class_start, num_classes)
    columns = columns_of(linear_weight.shape[0], class_start, num_classes)
    expected = torch.Size((target.shape[0], padded_classes(columns, logits.dtype)))
    row_checks.same_shape("logits", logits.shape, expected, "as linear_cross_entropy_chunk makes them")
    rows = (logits[:, :columns], target, lse, None if weight is None else weight[:columns])
    of_entropy = (grad_entropy, entropy)
    backward_checks.index_backward(
        grad_loss, grad_lse, *rows, divisor, *of_entropy, coefficient, class_start, num_classes, **options
    )


def _grad_outputs(
    logits: Tensor, _grad_loss: Tensor, _grad_lse: Tensor | None, linear_weight: Tensor, *rest: Any
) -> Outputs:
    wanted = len(rest) < 10 or rest[9]
    dtype = linear_weight.dtype
    return ((logits.shape[0], linear_weight.shape[1]) if wanted else (0,), dtype), ((0,), dtype)


def _check_add(
    grad_linear_weight: Tensor,
    grad_linear_bias: Tensor,
    grad_logits: Tensor,
    input: Tensor,
    columns: int,
    first: bool,
    count: Tensor | None = None,
) -> None:
    checks.two_dimensions(input)
    _check_count(count, input)
    row_checks.same_shape("grad_logits", grad_logits.shape[:1], input.shape[:1], "as many rows as the input")
    row_checks.check_value(
        padded_classes(columns, grad_logits.dtype) == grad_logits.shape[1],
        lambda: f"grad_logits has shape {tuple(grad_logits.shape)}, which {columns} classes do not have",
    )


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
        wanted = made.dim() != 1 or made.shape[0] != 0  # one size at a time: that of rows may depend on data
        if tensor is not None and made.dim() == tensor.dim() and wanted:
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
    keep = traced or transforms.is_batch(grad) or transforms.keep_graph()
    if not keep:
        ctx.gradients = None
    scaled = given_away(gradients, factor, ctx.needs_input_grad[1:4], ctx.dtype, keep)
    return None, *scaled, *(None,) * 4


def _chunk(input: Tensor, linear_weight: Tensor, *rest: Any, options: Options = DEFAULTS) -> tuple[Tensor, Tensor]:
    ids, classes = rest[8] if len(rest) > 8 else None, rest[2] if len(rest) > 2 else None
    if ids is not None:
        check_values(ids, linear_weight.shape[0] if classes is None else classes, options)
    return shard.chunk(input, linear_weight, *rest, options=options)


operator("linear_cross_entropy_chunk", check=_check_chunk, outputs=_chunk_outputs, reference=_chunk, composed=True)
operator(
    "linear_cross_entropy_chunk_grad_",
    check=_check_grad,
    outputs=_grad_outputs,
    reference=shard.chunk_grad_,
    composed=True,
    overwrites="logits",
)
operator(
    "linear_cross_entropy_chunk_add_",
    check=_check_add,
    outputs=lambda *_: (),
    reference=shard.chunk_add_,
    composed=True,
    overwrites="grad_linear_weight",
)
operator(
    "linear_cross_entropy_value",
    check=_check_value,
    outputs=lambda value, *_: ((value.shape, value.dtype),),
    reference=_value,
    composed=True,
)
autograd("linear_cross_entropy_value", _value_backward, _save_value)
