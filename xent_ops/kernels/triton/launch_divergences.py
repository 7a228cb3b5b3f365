"""Launchers of the operators for divergences; see launch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from ..divergences import FIELDS, STATISTICS, Divergences
from ..reference import accumulator
from ..rows import dense_like, optional_like, per_row_like
from ..sizes import size_hint
from . import configs
from .cached import Launch
from .common import Run, Strides, launcher, launcher_with_in_place_form, new_rows, new_tensor, row_layout
from .divergences import divergences_kernel
from .flags import DivergenceFlags, flags_of


def config(classes: int, itemsize: int, gradient: bool, loaded: bool) -> configs.Config:
    """A program walks over one row of each. Many warps keep few rows in flight, for the L2 cache.

    ``loaded``: a softcap, a mixture, several divergences, a log-probability of another temperature, or columns that are
    not whole vectors. More than 8 elements per thread would then spill.
    """
    row = max(next_power_of_2(classes), 128)
    if itemsize == 8:
        return configs.Config(min(row, 512), 4, 1)
    if row <= 4096:
        return configs.Config(min(row, 512 if loaded else 1024), 2, 1)
    if row <= 8192 or loaded:
        return configs.Config(2048, 8, 1)
    return configs.Config(4096, 16 if gradient else 8, 1)


class _Call:
    """The first stage: it reads the arguments and prepares the launch."""

    def __init__(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor,
        spec: Divergences,
        class_start: int | None = None,
        *,
        out_strides: Strides | None = None,  # strides of the rows that the gradient is written to
        statistics: bool = False,
        joined: bool = False,  # the joined statistics of all slices are an argument
        other: bool = False,  # another lse for the overlap
        narrow: bool = False,
        grad_scale: Tensor | None = None,
        hard_weight: float = 0.0,
    ) -> None:
        number, strides, self.rows = row_layout(logits)
        _, teacher_strides, self.teacher_rows = row_layout(teacher_logits)
        self.target = dense_like(target)
        self.empty = size_hint(number) == 0
        width, classes = logits.shape[-1], spec.columns(logits, class_start)
        vector = configs.vector(min(logits.element_size(), teacher_logits.element_size()))
        student, teacher, part = spec.student(), spec.teacher(), class_start is not None
        self.upstream, upstream_stride = per_row_like(grad_scale)
        kl, reverse_kl, mixture, overlap = (spec.reads(name) for name in FIELDS[:-1])
        flags = DivergenceFlags(
            kl=kl,
            reverse_kl=reverse_kl,
            mixture=mixture,
            overlap=overlap,
            hard=0 if not spec.reads("log_prob") else 1 if spec.temperature == 1.0 else 2,
            statistics=statistics,
            again=spec.visits_again() and (joined or (statistics and not part)),
            gradient=out_strides is not None,
            fixed=grad_scale is not None,
            narrow=narrow,
            other=other,
            ragged=classes % vector != 0,
            padded=classes < width,
            part=part,
        )
        capped = student.softcap is not None or teacher.softcap is not None
        several = kl + reverse_kl + mixture + overlap > 1
        loaded = capped or flags.ragged or mixture or flags.hard == 2 or several
        block, num_warps, num_stages = config(classes, logits.element_size(), flags.gradient, loaded)
        ignore_index, _, *activation = student.kernel_arguments()
        self.launch = Launch(
            divergences_kernel,
            number,
            number,
            classes,
            width,
            *strides,
            *teacher_strides,
            *(out_strides or strides),
            1 if grad_scale is None else upstream_stride,
            class_start or 0,
            spec.num_classes or 0,
            ignore_index,
            spec.beta,
            spec.temperature,
            hard_weight,
            *activation,
            *teacher.kernel_arguments()[2:],
            FLAGS=flags_of(student, False, logits.element_size()),
            TEACHER_FLAGS=flags_of(teacher, False, teacher_logits.element_size()),
            MODE=flags,
            BLOCK=block,
            VECTOR=vector,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    def __call__(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor,
        values: Tensor,  # of the accumulator's dtype, also in the place of tensors that are not used
        *,
        lse_all: Tensor | None = None,
        upstream: Tensor | None = None,
        joined: Tensor | None = None,
        statistics: Tensor | None = None,
        grad: Tensor | None = None,
    ) -> None:
        if self.empty:
            return
        rows, tensors = self.rows(logits), (lse_all, upstream, values, joined, statistics)
        row_args = [values if tensor is None else tensor for tensor in tensors]
        grad = rows if grad is None else grad
        self.launch(rows, self.teacher_rows(teacher_logits), self.target(target), *row_args, grad)


@launcher
def divergences_forward(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    teacher_lse: Tensor | None = None,
    joined: Tensor | None = None,
    class_start: int | None = None,
    **fields: Any,
) -> Run:
    spec, has_joined, dtype = Divergences(**fields), joined is not None, accumulator(logits)
    kinds: dict[str, Any] = {"statistics": not has_joined, "joined": has_joined, "other": teacher_lse is not None}
    call = _Call(logits, teacher_logits, target, spec, class_start, **kinds)
    new_values = new_tensor((len(FIELDS), *target.shape), dtype, logits.device)
    new_statistics = new_tensor((STATISTICS, *target.shape), dtype, logits.device)
    as_lse, as_joined = optional_like(teacher_lse, dtype), optional_like(joined, dtype)

    def run(
        logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor,
        teacher_lse: Tensor | None = None,
        joined: Tensor | None = None,
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        values, statistics = new_values(), new_statistics()
        row_args = {"lse_all": as_lse(teacher_lse, values), "joined": as_joined(joined, values)}
        call(logits, teacher_logits, target, values, **row_args, statistics=statistics)
        return values, statistics

    return run


@launcher_with_in_place_form
def divergences_backward(
    out_strides: Strides,
    grad_values: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    class_start: int | None = None,
    grad_dtype: torch.dtype | None = None,
    *,
    narrow: bool = False,
    **fields: Any,
) -> Run:
    row_args = (logits, teacher_logits, target, Divergences(**fields), class_start)
    call, dtype = _Call(*row_args, out_strides=out_strides, narrow=narrow), accumulator(logits)
    as_statistics, as_upstream = dense_like(statistics, dtype), dense_like(grad_values, dtype)

    def write(
        gradient: Tensor,
        grad_values: Tensor,
        logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor,
        statistics: Tensor,
        *_: Any,
    ) -> None:
        saved = as_statistics(statistics)
        call(logits, teacher_logits, target, saved, upstream=as_upstream(grad_values), joined=saved, grad=gradient)

    return write


@launcher_with_in_place_form
def divergences_with_grad(
    out_strides: Strides,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    grad_scale: Tensor,
    grad_dtype: torch.dtype | None = None,
    *,
    narrow: bool = False,
    hard_weight: float = 0.0,
    **fields: Any,
) -> Run:
    kinds: dict[str, Any] = {"statistics": True, "grad_scale": grad_scale, "hard_weight": hard_weight, "narrow": narrow}
    call = _Call(logits, teacher_logits, target, Divergences(**fields), out_strides=out_strides, **kinds)
    new_loss = new_rows(logits)

    def write(
        gradient: Tensor, logits: Tensor, teacher_logits: Tensor, target: Tensor, grad_scale: Tensor, *_: Any
    ) -> tuple[Tensor]:
        loss = new_loss()
        call(logits, teacher_logits, target, loss, upstream=call.upstream(grad_scale), grad=gradient)
        return (loss,)

    return write
