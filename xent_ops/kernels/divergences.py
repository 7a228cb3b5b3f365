"""The options of a token's divergences as one record."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .options import DEFAULTS, RowOptions
from .reference import columns_of

# Rows of the values, and of their upstream gradients.
FIELDS = ("kl", "reverse_kl", "mixture", "overlap", "log_prob")
STATISTICS = 11  # see reference_divergences.py


class Divergences(NamedTuple):
    """The operators take the same fields, with ``options`` spelled out (``as_record``)."""

    options: RowOptions = DEFAULTS  # ignore_index, and the student's activation at a temperature of one
    num_classes: int | None = None
    beta: float = 0.5  # of the mixture
    temperature: float = 1.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    fields: str = "kl"  # those that are wanted, with commas

    def keywords(self) -> dict[str, Any]:
        """The keywords of an operator. Defaults are left out, as in ``RowOptions.keywords``."""
        options = self.options.keywords()
        options.pop("label_smoothing", None)
        for name, value, default in zip(self._fields[1:], self[1:], Divergences()[1:], strict=True):
            if torch.compiler.is_compiling() or value != default:
                options[name] = value
        return options

    def reads(self, *names: str) -> bool:
        return not set(self.fields.split(",")).isdisjoint(names)

    def visits_again(self) -> bool:
        """Does a value need the lse's of all classes first?"""
        return self.reads("mixture", "overlap")

    def other_lse(self) -> bool:
        """Is the log-probability's temperature another one?"""
        return self.reads("log_prob") and self.temperature != 1.0

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


class FixedLoss(NamedTuple):
    """The first of the fields, plus ``hard_weight`` times the cross entropy on the target, its second one."""

    spec: Divergences
    hard_weight: float = 0.0

    def coefficients(self) -> dict[str, float]:
        name, *log_prob = self.spec.fields.split(",")
        return {name: 1.0} | dict.fromkeys(log_prob, -self.hard_weight)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The losses of rows, (...), from their values, (5, ...)."""
        first, *others = [values[FIELDS.index(name)] for name in self.coefficients()]
        return first - self.hard_weight * others[0] if others else first

    def upstream(self, scale: torch.Tensor) -> torch.Tensor:
        """The gradients of the values, (5, n), from those of the losses, (n,)."""
        coefficients, zeros = self.coefficients(), torch.zeros_like(scale)
        return torch.stack([scale * coefficients[name] if name in coefficients else zeros for name in FIELDS])


def _divided(options: RowOptions, temperature: float) -> RowOptions:
    softcap = None if options.softcap is None else options.softcap / temperature
    return options._replace(softcap=softcap, logit_scale=options.logit_scale / temperature)
