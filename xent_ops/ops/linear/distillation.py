"""Operators of distillation from hidden states: losses of rows, and the one pass that makes the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...head import distillation as of_heads
from ...head.float16 import split_divisors
from ...head.products import accumulator_of_weight
from ...kernels.distillation import Distillation
from ...kernels.options import Chunking, LossOptions, Options
from ...kernels.reference import accumulator
from ...kernels.reference_distillation import STATISTICS
from .. import checks as row_checks
from .. import distillation_checks, transforms
from ..distillation import refuse_derivatives, save_for_nothing
from ..library import Outputs, autograd, needs_grad, operator
from . import checks
from .operators import given_away, gradients_of


def check(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    **given: Any,
) -> None:
    checks.sizes_of(Chunking(chunk_rows, skip_ignored))
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    check_heads(student, target, teacher, Distillation(**given), accumulate_dtype=accumulate_dtype)


def check_heads(
    student: tuple[Tensor, Tensor, Tensor | None],  # input, weight, bias
    target: Tensor,
    teacher: tuple[Tensor, Tensor, Tensor | None],
    how: Distillation,
    class_start: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    names: tuple[str, str] = checks.NAMES,
    teacher_names: tuple[str, str] = ("teacher_weight", "teacher_bias"),
) -> None:
    """Of all classes, or with a class_start of a slice, which may be empty. ``names``: of weights and biases."""
    (input, linear_weight, _), (teacher_input, teacher_weight, _) = student, teacher
    of_slice: dict[str, Any] = {"may_be_empty": class_start is not None}
    checks.head(*student, accumulate_dtype, names=names, **of_slice)
    checks.head(*teacher, names=teacher_names, input_name="teacher_input", **of_slice)
    row_checks.same_device("teacher_input", teacher_input, input, "input is")
    rows = input.shape[:-1]
    row_checks.same_shape("teacher_input", teacher_input.shape[:-1], rows, "the rows of input, before the features")
    row_checks.dtype("target", target, row_checks.INDICES)
    row_checks.same_shape("target", target.shape, rows, "one class index for each row of the input")
    row_checks.same_device("target", target, input, "input is")
    distillation_checks.options(how, input, teacher_input)
    widths = linear_weight.shape[0], teacher_weight.shape[0]
    distillation_checks.slices(how, class_start, *widths, (names[0], teacher_names[0]))


def check_with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divisor: Tensor | None = None,
    token_weight: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
    *,
    reduction: str = "mean",
    **more: Any,
) -> None:
    heads = (input, linear_weight, target, teacher_input, teacher_weight, linear_bias, teacher_bias)
    check(*heads, accumulate_dtype=accumulate_dtype, **more)
    checks.gradient_mask(output_mask)
    row_checks.token_weight(token_weight, target)
    row_checks.reduction(reduction, ("mean", "sum"))
    checks.reduced_by(divisor, input, reduction)


def _outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divisor: Tensor | None = None,
    token_weight: Tensor | None = None,
    output_mask: Any = (True, True, True),
    accumulate_dtype: torch.dtype | None = None,
) -> Outputs:
    dtype = accumulator(input)
    grad_input, grad_weight, grad_bias = gradients_of(input, linear_weight, output_mask)
    sums = accumulator_of_weight(input.dtype, accumulate_dtype)
    return ((), dtype), ((2,), dtype), grad_input, (grad_weight[0], sums), (grad_bias[0], dtype)


def _refuse_gradients_of_teacher(ctx: Any) -> None:
    for position, name in ((3, "teacher_input"), (4, "teacher_weight"), (6, "teacher_bias")):
        if needs_grad(ctx, position):
            distillation_checks.teacher_needs_grad(name)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    input, _, target, _, _, _, _, _, token_weight, made, *_ = inputs
    needed = [needs_grad(ctx, position) for position in (0, 1, 5)]
    ctx.mask = [bool(wanted and need) for wanted, need in zip(made, needed, strict=True)]
    _refuse_gradients_of_teacher(ctx)
    if needs_grad(ctx, 7):
        checks.divisor_needs_grad()
    _value, divided_by, *gradients = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(divided_by, *gradients)
    ctx.dtype = input.dtype
    ctx.loss = LossOptions(Options(keyword_only_inputs.get("ignore_index", -100)))
    if ctx.dtype == torch.float16:
        ctx.save_for_backward(divided_by, target, token_weight)
    # An attribute, not saved tensors: the first backward scales the gradients in place and gives them away.
    ctx.gradients = gradients


def _backward(ctx: Any, grad_value: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_value is None:
        return (None,) * 11
    if torch.is_grad_enabled():  # create_graph=True
        ctx.number = 11
        refuse_derivatives(ctx)
    if ctx.gradients is None:
        raise RuntimeError(
            "the gradients of this loss were given away by its first backward, which did not ask for retain_graph=True"
        )
    gradients, factor = ctx.gradients, grad_value
    if ctx.dtype == torch.float16:
        divided_by, target, token_weight = ctx.saved_tensors
        later = split_divisors(ctx.dtype, divided_by, target, token_weight, loss=ctx.loss)[1]
        assert later is not None
        factor = grad_value / later
    # Compiled autograd traces this, and replays no change of ctx: there the gradients stay as they are.
    traced = torch.compiler.is_compiling()
    keep = traced or transforms.is_batch(grad_value) or transforms.keep_graph()
    if not keep:
        ctx.gradients = None
    of_input, of_weight, of_bias = given_away(gradients, factor, ctx.mask, ctx.dtype, keep)
    return of_input, of_weight, None, None, None, of_bias, *(None,) * 5


def check_backward(
    grad_loss: Tensor,
    statistics: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    **more: Any,
) -> None:
    check(input, linear_weight, target, teacher_input, teacher_weight, linear_bias, teacher_bias, **more)
    checks.gradient_mask(output_mask)
    row_checks.scalar_or_rows_of("input", input, grad_loss=grad_loss)
    distillation_checks.statistics_of_rows("statistics", statistics, target, input)


def _rows(input: Tensor, linear_weight: Tensor, target: Tensor, *_: Any) -> Outputs:
    dtype = accumulator(input)
    return (target.shape, dtype), ((STATISTICS, *target.shape), dtype)


def _gradients(_grad_loss: Tensor, _statistics: Tensor, input: Tensor, linear_weight: Tensor, *rest: Any) -> Outputs:
    return gradients_of(input, linear_weight, rest[5] if len(rest) > 5 else (True, True, True))


def _save_rows(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _refuse_gradients_of_teacher(ctx)
    _loss, statistics = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(statistics, *inputs)
    ctx.options = keyword_only_inputs


def _rows_backward(ctx: Any, grad_loss: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 7
    mask = [needs_grad(ctx, position) for position in (0, 1, 5)]
    made = torch.ops.xent.linear_distillation_backward(grad_loss, *ctx.saved_tensors, mask, **ctx.options)
    of_input, of_weight, of_bias = (grad if wanted else None for grad, wanted in zip(made, mask, strict=True))
    return of_input, of_weight, None, None, None, of_bias, None


operator(
    "linear_distillation_forward",
    check=check,
    outputs=_rows,
    reference=of_heads.losses,
    composed=True,
)
autograd("linear_distillation_forward", _rows_backward, _save_rows)

operator(
    "linear_distillation_backward",
    check=check_backward,
    outputs=_gradients,
    reference=of_heads.gradients,
    composed=True,
)
autograd("linear_distillation_backward", refuse_derivatives, save_for_nothing)

operator(
    "linear_distillation_with_grad",
    check=check_with_grad,
    outputs=_outputs,
    reference=of_heads.with_grad,
    composed=True,
)
autograd("linear_distillation_with_grad", _backward, _save)
