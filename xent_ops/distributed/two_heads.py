"""Two heads whose classes are split between ranks: the arguments that the functions of their divergences share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..divergence_function import bind_teacher
from ..head.divergence_chunk import TeacherHead
from ..kernels.divergences import Divergences
from ..linear_call import LinearCall, bind
from ..ops import checks, distillation_arguments, distillation_checks, transforms
from ..ops.dtensors import only_plain_tensors
from ..ops.library import OPERATORS
from .bound import CALLED, NAMES, bind_shard
from .groups import Ranks

_CALLED = {**CALLED, "teacher_weight": "teacher_weight_shard", "teacher_bias": "teacher_bias_shard"}


def bind_two_heads(
    name: str,
    ranks: Ranks,
    student: tuple[Any, Any, Any],  # input, weight_shard, bias_shard
    teacher: tuple[Any, Any, Any],
    target: Any,
    hard_weight: Any,
    row_tensors: Sequence[Any],  # with a dimension for each of the rows: token_weight, or a user's rows
    place: tuple[Any, Any, bool],  # num_classes, class_start, sequence_parallel
    row_options: tuple[Any, Any, Any],  # ignore_index, softcap, logit_scale
    divergence_options: tuple[Any, ...],
    raw_chunking: tuple[Any, ...],
    reduction: Any,
    divisor: Any,
    token_weight: Any = None,
    classes: Any = None,
) -> tuple[LinearCall, TeacherHead, Divergences]:
    """All errors that this rank can detect, except for target values."""
    input, weight_shard, bias_shard = student
    num_classes, class_start, sequence_parallel = place
    only_plain_tensors(name, *student, *teacher, target, *row_tensors, divisor, classes)
    world = ranks.world if sequence_parallel else 1
    rows = _rows(input, row_tensors, world, reduction) if target is None else None
    ignore_index, softcap, logit_scale = row_options
    target, ignored = distillation_arguments.target_of(target, ignore_index, hard_weight, input, rows)
    raw_options = (ignored, 0.0, softcap, logit_scale, 0.0, reduction)
    head_args = (input, weight_shard, target, bias_shard, None)
    call = bind(*head_args, raw_options, raw_chunking, divisor, token_weight, names=NAMES)
    call = bind_shard(call, ranks, None, num_classes, class_start, sequence_parallel)
    options = (call.head.shard_range[1], *divergence_options)
    spec = distillation_arguments.spec(ignored, softcap, logit_scale, options)
    teacher_head = bind_teacher(teacher, classes, "_shard")
    if transforms.is_traced():  # the operators of chunks refuse the rest
        rows_of = (teacher_head.teacher_input.shape[:-1], call.input.shape[:-1])
        checks.same_shape("rows of teacher_input", *rows_of, "those of the input")
    else:
        _check_heads(call, teacher_head, spec)
    return call, teacher_head, spec


def _check_heads(call: LinearCall, teacher: TeacherHead, spec: Divergences) -> None:
    head, target, start = call.head, call.target, call.head.shard_range[0]
    if call.sequence_dim is not None:
        target = target.new_empty(()).expand(call.input.shape[:-1])
    tensors = {"input": call.input, "linear_weight": head.weight, "linear_bias": head.bias, "target": target}
    contract = OPERATORS["linear_divergences_chunk"].contract
    slices = contract.blank(**tensors, **teacher._asdict(), class_start=start, num_classes=spec.num_classes)
    contract.check_tensors(slices, _CALLED)
    distillation_checks.options(spec, call.input, teacher.teacher_input)
    classes = teacher.teacher_weight if teacher.classes is None else teacher.classes
    names = (_CALLED["linear_weight"], _CALLED["teacher_weight"])
    distillation_checks.slices(spec, start, head.weight.shape[0], classes.shape[0], names)


def _rows(input: Any, row_tensors: Sequence[Any], world: int, reduction: Any) -> Sequence[int] | None:
    """The shape of all rows, for a call without a target. None for an input that a later check refuses."""
    if not isinstance(input, Tensor) or input.dim() == 0:
        return None
    shape = input.shape[:-1]
    if world == 1 or len(shape) == 0:
        return shape
    for tensor in row_tensors:
        if isinstance(tensor, Tensor):
            return tensor.shape[: len(shape)]
    if reduction == "none":
        raise ValueError(
            "without a target nothing says along which dimension sequence_parallel=True splits the rows: pass one with "
            'reduction="none"'
        )
    return world * shape[0], *shape[1:]  # a sum does not depend on the order
