"""Divergences of two heads, by chunks of rows: products with both heads, and row operators on their logits.

It works like cross_entropy.py, with two chunks of logits at a time: the student's and the teacher's. The teacher's
products are skipped for the rows that the student's products skip.

With ``classes`` the student's classes are some of the teacher's. The teacher's logits are computed for all of its
classes, for their lse, and the columns of the student's classes are taken from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.divergences import FIELDS, STATISTICS, Divergences
from ..kernels.options import Chunking, LossOptions, RowOptions
from ..kernels.reference import accumulator, is_counted
from ..kernels.sizes import size_hint
from . import float16
from .backend import IN_MEMORY, Backend
from .chunks import HeadGradients, as_rows, classes_of, divisors_and_factors, in_dtype, unpack_statistics
from .packing import ComputedRows
from .products import accumulator_of_weight
from .sizes import rows_of_chunk

_ops = torch.ops.xent


Head = tuple[Tensor, Tensor, Tensor | None]  # input, weight, bias
_SKIPPED = (0.0,) * (len(FIELDS) + STATISTICS)


def dtype_of_teacher(dtype: torch.dtype, logits_dtype: torch.dtype | None) -> torch.dtype:
    """Of the teacher's logits: no option makes them narrower."""
    return dtype if logits_dtype is None or dtype.itemsize > logits_dtype.itemsize else logits_dtype


class TeacherRows(NamedTuple):
    logits: Tensor  # (..., T), of the student's classes
    all_logits: Tensor  # of all of the teacher's classes
    lse: Tensor | None = None  # (2, ...) with lse_low, of all of the teacher's classes. None: they are the student's
    top: Tensor | None = None  # (...), the argmax of all of them; only if it is wanted


def of_student(logits: Tensor, classes: Tensor | None) -> Tensor:
    """The teacher's logits of the student's classes."""
    if classes is None:
        return logits
    # A class that the teacher lacks makes the loss NaN elsewhere; here it must not read other memory.
    return logits.index_select(-1, classes.to(torch.int64).clamp(0, logits.shape[-1] - 1))


def teacher_rows(
    logits: Tensor, target: Tensor, classes: Tensor | None, with_tops: bool, spec: Divergences
) -> TeacherRows:
    """Of the teacher's logits."""
    lse = top = None
    if classes is not None or with_tops:
        lse, top = lse_and_top(logits, target, spec.teacher(), spec, with_tops)
    logits_of_classes = of_student(logits, classes)
    return TeacherRows(logits_of_classes, logits, None if classes is None else lse, top if with_tops else None)


def lse_and_top(
    logits: Tensor, target: Tensor, options: RowOptions, spec: Divergences, with_top: bool = True
) -> tuple[Tensor, Tensor]:
    """(lse and lse_low (2, ...), argmax) of counted rows. The logits of ignored rows are not read."""
    logits = logits[..., : spec.columns(logits)]
    if logits.shape[-1] == 0:  # a slice without classes
        lse = logits.new_full(target.shape, float("-inf"), dtype=accumulator(logits))
        return torch.stack([lse, torch.zeros_like(lse)]), torch.zeros_like(target)
    index = torch.where(is_counted(target, spec.options.ignore_index), 0, -100)
    keywords = options._replace(ignore_index=-100).keywords()
    _, lse, top, _, low = _ops.cross_entropy_forward(logits, index, None, with_top, False, False, True, **keywords)
    return torch.stack([lse, low]), top


def tops(logits: Tensor, teacher: TeacherRows, target: Tensor, classes: Tensor | None, spec: Divergences) -> Tensor:
    """(2, ...), 1 or 0: do the argmaxes agree; is the teacher's one of the student's classes?"""
    _, of_teacher, covers = top_classes(logits, teacher, target, classes, spec)
    assert teacher.top is not None
    return torch.stack([of_teacher == teacher.top, covers]).to(accumulator(logits))


def top_classes(
    logits: Tensor, teacher: TeacherRows, target: Tensor, classes: Tensor | None, spec: Divergences
) -> tuple[Tensor, Tensor, Tensor]:
    """(the student's argmax, its class of the teacher's, is the teacher's argmax one of the student's classes?)"""
    assert teacher.top is not None
    _, top = lse_and_top(logits, target, spec.student(), spec)
    if classes is None:
        return top, top, torch.ones_like(top, dtype=torch.bool)
    if len(classes) == 0:
        return top, top, torch.zeros_like(top, dtype=torch.bool)
    return top, classes[top].to(torch.int64), named_by(classes, teacher.all_logits.shape[-1])[teacher.top]


def named_by(classes: Tensor, number: int) -> Tensor:
    """(number,): is this class among these? Those out of range name any."""
    named = torch.zeros(number, dtype=torch.bool, device=classes.device)
    return named.index_fill(0, classes.to(torch.int64).clamp(0, number - 1), True)


def nan_unless_different(classes: Tensor, number: int) -> Tensor:
    """(): 1 for different classes of ``number``, else NaN. It does not synchronise."""
    classes = classes.to(torch.int64)  # torch compares a number of 8 bits with 300 as with 44
    valid = ((classes >= 0) & (classes < number)).all()
    return torch.where(valid & (named_by(classes, number).sum() == classes.shape[0]), 1.0, float("nan"))


def _products(
    student: Head,
    target: Tensor,
    teacher: Head,
    spec: Divergences,
    chunking: Chunking,
    backend: Backend,
    output_mask: Sequence[bool] = (False, False, False),
    accumulate_dtype: torch.dtype | None = None,
) -> tuple[ComputedRows, Any, Divergences]:
    """The rows that both heads multiply, the student's products, whose ``other_heads`` has the teacher's, and the
    options of their logits. Padding rows of the heads, which may hold any values, are not multiplied.
    """
    flat, flat_teacher = as_rows(student[0]), as_rows(teacher[0])
    head, bias, _, padding = classes_of(*student[1:], None, 0, spec.num_classes)
    teacher_head, teacher_bias, _, _ = classes_of(*teacher[1:], None, 0, spec.num_classes)
    heads = (flat, head), (flat_teacher, teacher_head)
    rows = backend.rows(target, spec.options.ignore_index, chunking, *heads)
    wider = output_mask[1] and accumulator_of_weight(flat.dtype, accumulate_dtype) != flat.dtype
    size_args = (chunking.chunk_rows, chunking.logits_dtype, 2)
    size = rows_of_chunk(size_hint(rows.number), flat, size_hint(head.shape[0]), wider, *size_args)
    chunking = chunking._replace(chunk_rows=size)
    products = backend.products(rows, flat, head, bias, chunking, output_mask, accumulate_dtype, padding)
    dtype = dtype_of_teacher(flat_teacher.dtype, chunking.logits_dtype)
    teacher_chunking = Chunking(products.size, logits_dtype=None if dtype == flat_teacher.dtype else dtype)
    products.other_heads = (backend.products(rows, flat_teacher, teacher_head, teacher_bias, teacher_chunking),)
    return rows, products, spec._replace(num_classes=None)


def linear_divergences_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    classes: Tensor | None = None,
    with_tops: bool = False,
    *,
    accumulate_dtype: torch.dtype | None = None,  # only the backward uses it
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(values and statistics of the rows, as divergences_forward returns them; ``tops``, or (0,))."""
    spec, chunking = Divergences(**fields), Chunking(chunk_rows, skip_ignored, logits_dtype)
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    rows, products, spec = _products(student, target, teacher, spec, chunking, backend)
    ignored = spec.options.ignore_index if skip_ignored else None

    def visit(logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        given = teacher_rows(teacher_logits, target, classes, with_tops, spec)
        found = _ops.divergences_forward(logits, given.logits, target, given.lse, **spec.keywords())
        found = [row for part in found for row in part.unbind()]
        return [*found, *tops(logits, given, target, classes, spec)] if with_tops else found

    fills = _SKIPPED + (0.0, 0.0) * with_tops
    computed = unpack_statistics(rows, products.run(visit, rows.indices()), fills, target, ignored)
    of_values, of_both = len(FIELDS), len(_SKIPPED)
    found_tops = torch.stack(computed[of_both:]) if with_tops else computed[0].new_empty(0)
    return torch.stack(computed[:of_values]), torch.stack(computed[of_values:of_both]), found_tops


def linear_divergences_backward(
    grad_values: Tensor,
    statistics: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    classes: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    accumulate_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> HeadGradients:
    """Compute both logits again. Gradients have the student's dtype, or are (0,) if the mask does not want them."""
    spec, dtype, chunking = Divergences(**fields), accumulator(input), Chunking(chunk_rows, skip_ignored, logits_dtype)
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    rows, products, spec = _products(student, target, teacher, spec, chunking, backend, output_mask, accumulate_dtype)
    indices, grad_rows = rows.indices(), torch.stack([rows.pack(grad) for grad in grad_values.to(dtype).unbind()], -1)
    factors, (upstream, *_) = float16.split_grads(input.dtype, [grad_rows, None, None], indices, spec.options)

    def visit(
        logits: Tensor, teacher_logits: Tensor, target: Tensor, grads: Tensor, *statistics: Tensor
    ) -> Sequence[Tensor]:
        row_args = {"logits": logits, "teacher_logits": of_student(teacher_logits, classes), "target": target}
        row_args |= {"grad_values": grads.t(), "statistics": torch.stack(statistics)}
        return products.write("divergences_backward", **row_args, grad_dtype=products.grad_dtype, **spec.keywords())

    if any(output_mask):
        values = [rows.pack(value) for value in statistics.unbind()]
        shares = None if factors is None else factors.shares
        products.run(visit, indices, upstream, *values, gradient=True, shares=shares)
    return in_dtype(products.gradients(input.shape, factors), input.dtype)


def linear_divergences_with_grad(
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
    hard_weight: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    skip_ignored: bool = False,
    logits_dtype: torch.dtype | None = None,
    backend: Backend = IN_MEMORY,
    **fields: Any,
) -> tuple[Tensor, ...]:
    """(value, divisors, gradients). The gradients are like those of linear_cross_entropy_with_grad."""
    spec, chunking = Divergences(**fields), Chunking(chunk_rows, skip_ignored, logits_dtype)
    loss = LossOptions(RowOptions(spec.options.ignore_index), reduction=reduction)
    divisors, (scale, _), shares = divisors_and_factors(input, target, None, token_weight, divisor, loss)
    student, teacher = (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)
    rows, products, spec = _products(student, target, teacher, spec, chunking, backend, output_mask, accumulate_dtype)
    factors = None if token_weight is None and shares is None else rows.pack(scale)
    shares = None if shares is None else rows.pack(shares)

    def visit(logits: Tensor, teacher_logits: Tensor, target: Tensor, factor: Tensor | None) -> Sequence[Tensor]:
        row_args = {"logits": logits, "teacher_logits": teacher_logits, "target": target}
        row_args["grad_scale"] = scale if factor is None else factor
        keywords = {**spec.keywords(), "hard_weight": hard_weight, "grad_dtype": products.grad_dtype}
        return products.write("divergences_with_grad", **row_args, **keywords)

    computed = products.run(visit, rows.indices(), factors, gradient=True, shares=shares)
    (row_loss,) = unpack_statistics(rows, computed, (0.0,), target, None)
    summary_args = (row_loss, row_loss, target, None, token_weight, divisors)
    value, *_ = _ops.row_summary(*summary_args, **loss._replace(reduction="mean").reduction_keywords())
    return value, divisors, *products.gradients(input.shape)
