"""Launchers of the operators for distillation; see launch.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton import next_power_of_2

from ..distillation import Distillation
from ..reference import accumulator
from ..reference_distillation import STATISTICS
from ..rows import dense_like, per_row_like
from ..sizes import size_hint
from . import configs
from .cached import Launch
from .common import Run, Strides, launcher, launcher_with_in_place_form, new_rows, new_tensor, row_layout
from .distillation import distillation_kernel
from .flags import DistillationFlags, flags_of


def config(classes: int, itemsize: int, gradient: bool, loaded: bool) -> configs.Config:
    """A program walks over one row of each. Many warps keep few rows in flight, for the L2 cache.

    ``loaded``: a softcap, a beta between 0 and 1, a cross entropy of another temperature, or columns that are not whole
    vectors. More than 8 elements per thread would then spill.
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
        upstream: Tensor | None,
        out_strides: Strides | None,  # strides of the rows that the gradient is written to
        statistics: bool,
        spec: Distillation,
        class_start: int | None = None,
        joined: bool = False,  # the joined statistics of all slices are an argument
    ) -> None:
        number, strides, self.rows, _ = row_layout(logits)
        _, teacher_strides, self.teacher_rows, _ = row_layout(teacher_logits)
        self.target = dense_like(target)
        self.upstream, upstream_stride = per_row_like(upstream)
        self.empty = size_hint(number) == 0
        width, classes = logits.shape[-1], spec.columns(logits, class_start)
        itemsize = min(logits.element_size(), teacher_logits.element_size())
        vector = configs.vector(itemsize)
        student, teacher = spec.student(), spec.teacher()
        beta, part = 0 if spec.beta == 0.0 else 1 if spec.beta == 1.0 else 2, class_start is not None
        flags = DistillationFlags(
            beta=beta,
            hard=0 if spec.hard_weight == 0.0 else 1 if spec.temperature == 1.0 else 2,
            statistics=statistics,
            divergence=joined or (statistics and beta == 2 and not part),
            gradient=out_strides is not None,
            ragged=classes % vector != 0,
            padded=classes < width,
            part=part,
        )
        capped = student.softcap is not None or teacher.softcap is not None
        loaded = capped or flags.ragged or flags.beta == 2 or flags.hard == 2
        block, num_warps, num_stages = config(classes, logits.element_size(), flags.gradient, loaded)
        ignore_index, _, *activation = student.kernel_arguments()
        self.launch = Launch(
            distillation_kernel,
            number,
            number,
            classes,
            width,
            *strides,
            *teacher_strides,
            *(out_strides or strides),
            upstream_stride,
            class_start or 0,
            spec.num_classes or 0,
            ignore_index,
            spec.beta,
            spec.temperature,
            spec.hard_weight,
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
        upstream: Tensor | None,
        loss: Tensor,
        joined: Tensor,
        statistics: Tensor,
        grad: Tensor | None,
    ) -> None:
        if self.empty:
            return
        self.launch(
            self.rows(logits),
            self.teacher_rows(teacher_logits),
            self.target(target),
            loss if upstream is None else self.upstream(upstream),
            loss,
            joined,
            statistics,
            logits if grad is None else grad,
        )


@launcher
def distillation_forward(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    joined: Tensor | None = None,
    class_start: int | None = None,
    **fields: Any,
) -> Run:
    spec, has_joined = Distillation(**fields), joined is not None
    call = _Call(logits, teacher_logits, target, None, None, not has_joined, spec, class_start, has_joined)
    new_loss, dtype = new_rows(logits), accumulator(logits)
    new_statistics = new_tensor((STATISTICS, *target.shape), dtype, logits.device)
    as_joined = None if joined is None else dense_like(joined, dtype)

    def run(
        logits: Tensor, teacher_logits: Tensor, target: Tensor, joined: Tensor | None = None, *_: Any
    ) -> tuple[Tensor, Tensor]:
        loss, statistics = new_loss(), new_statistics()
        all_statistics = statistics if as_joined is None or joined is None else as_joined(joined)
        call(logits, teacher_logits, target, None, loss, all_statistics, statistics, None)
        return loss, statistics

    return run


@launcher_with_in_place_form
def distillation_backward(
    out_strides: Strides,
    grad_loss: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    class_start: int | None = None,
    **fields: Any,
) -> Run:
    call = _Call(logits, teacher_logits, target, grad_loss, out_strides, False, Distillation(**fields), class_start)
    as_statistics = dense_like(statistics, accumulator(logits))

    def write(
        gradient: Tensor,
        grad_loss: Tensor,
        logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor,
        statistics: Tensor,
        *_: Any,
    ) -> None:
        statistics = as_statistics(statistics)
        call(logits, teacher_logits, target, grad_loss, statistics, statistics, statistics, gradient)

    return write


@launcher_with_in_place_form
def distillation_with_grad(
    out_strides: Strides, logits: Tensor, teacher_logits: Tensor, target: Tensor, grad_scale: Tensor, **fields: Any
) -> Run:
    call = _Call(logits, teacher_logits, target, grad_scale, out_strides, True, Distillation(**fields))
    new_loss = new_rows(logits)

    def write(
        gradient: Tensor, logits: Tensor, teacher_logits: Tensor, target: Tensor, grad_scale: Tensor
    ) -> tuple[Tensor]:
        loss = new_loss()
        call(logits, teacher_logits, target, grad_scale, loss, loss, loss, gradient)
        return (loss,)

    return write
