"""The options of a distillation as one record."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .options import DEFAULTS, RowOptions
from .reference import columns_of


class Distillation(NamedTuple):
    """The operators take the same fields, with ``options`` spelled out (``as_record``)."""

    options: RowOptions = DEFAULTS  # ignore_index, and the student's activation at a temperature of one
    num_classes: int | None = None
    beta: float = 0.0
    temperature: float = 1.0
    hard_weight: float = 0.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0

    def keywords(self) -> dict[str, Any]:
        """The keywords of an operator. Defaults are left out, as in ``RowOptions.keywords``."""
        options = self.options.keywords()
        options.pop("label_smoothing", None)
        for name, value, default in zip(self._fields[1:], self[1:], Distillation()[1:], strict=True):
            if torch.compiler.is_compiling() or value != default:
                options[name] = value
        return options

    def student(self) -> RowOptions:
        """The options of the student's activation: the temperature divides both the cap and the scale."""
        return _divided(self.options, self.temperature)

    def teacher(self) -> RowOptions:
        options = self.options._replace(softcap=self.teacher_softcap, logit_scale=self.teacher_logit_scale)
        return _divided(options, self.temperature)

    def columns(self, logits: torch.Tensor, class_start: int | None = None) -> int:
        """The number of columns that are classes. With a class_start they are a slice of num_classes."""
        if class_start is not None:
            return columns_of(logits.shape[-1], class_start, self.num_classes)
        return logits.shape[-1] if self.num_classes is None else self.num_classes


def _divided(options: RowOptions, temperature: float) -> RowOptions:
    softcap = None if options.softcap is None else options.softcap / temperature
    return options._replace(softcap=softcap, logit_scale=options.logit_scale / temperature)
