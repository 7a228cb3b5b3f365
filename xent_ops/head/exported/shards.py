"""One rank's rows of a head: the operators of shard.py and distillation_shard.py, and the loop's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.distillation import Distillation
from ...kernels.options import DEFAULTS, Chunking, Options
from .. import distillation_shard, shard
from ..chunks import as_rows, classes_of
from ..sizes import padded_classes
from .loop import Loop, logits_of


def statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_start: int,
    num_classes: int,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    entropy: bool = False,
    *,
    options: Options = DEFAULTS,
    **chunking: Any,
) -> Tensor:
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)

    def of_rows(logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        return shard.numbers(logits, target, class_start, num_classes, weight, entropy, options)

    made = Loop(as_rows(input), head, bias, Chunking(**chunking))(of_rows, target.reshape(-1))
    return shard.handed_over(made, class_start, len(head), weight, entropy)


def chunk(
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
    *,
    options: Options = DEFAULTS,
) -> tuple[Tensor, Tensor]:
    head, bias, weight, _ = classes_of(linear_weight, linear_bias, weight, class_start, num_classes)
    logits = logits_of(input, head, bias, logits_dtype)
    behind = padded_classes(head.shape[0], logits.dtype) - head.shape[0]
    given = (target, class_start, num_classes, weight, entropy, ids, options)
    return shard.statistics_of_chunk(logits, *given), torch.nn.functional.pad(logits, (0, behind))


def distillation_chunk(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    class_start: int,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    after: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    how, made = Distillation(**given), []
    for rows, weight, bias in ((input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias)):
        head, bias, _, _ = classes_of(weight, bias, None, class_start, how.num_classes)
        made.append(logits_of(rows, head, bias))
    stats = distillation_shard.statistics_of_chunk(made[0], made[1], target, class_start, how)
    behind = [padded_classes(logits.shape[1], logits.dtype) - logits.shape[1] for logits in made]
    padded = [torch.nn.functional.pad(logits, (0, more)) for logits, more in zip(made, behind, strict=True)]
    return stats, padded[0], padded[1]
