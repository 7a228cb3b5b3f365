"""The options of a loss as one record, from the call to the launch."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch

from .sizes import symbolic

Reduction = Literal["none", "mean", "sum"]
"""How a loss reduces the losses of its rows: for type checkers."""


TokenReduction = Literal["mean", "sum"]
"""How a loss that is a function of tokens reduces their numbers: for type checkers."""


class RowOptions(NamedTuple):
    """What changes the loss of a row. Schemas and Triton signatures spell the fields out, in this order."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def keywords(self) -> dict[str, Any]:
        """As operators take them. Those at their defaults are left out: each takes the dispatcher 0.4 us."""
        # To ask would specialise a symbolic option. torch 2.11 also traces where it says that it does not compile.
        if torch.compiler.is_compiling() or symbolic(self.ignore_index):
            return self._asdict()
        if self == DEFAULTS:
            return {}
        return {
            name: value
            for name, value, default in zip(RowOptions._fields, self, DEFAULTS, strict=True)
            if value != default
        }

    def kernel_arguments(self) -> tuple[int, float, float, float]:
        """As kernels take them: no softcap is 0."""
        return self.ignore_index, self.label_smoothing, self.softcap or 0.0, self.logit_scale

    @property
    def is_increasing(self) -> bool:
        """Is the largest logit that of the largest x?"""
        return self.logit_scale > 0.0

    @property
    def plain_scale(self) -> float | None:
        """x per logit where it is positive, with a margin for float32, and there is no other option; else None."""
        plain = self.label_smoothing == 0.0 and self.softcap is None
        return self.logit_scale if plain and self.logit_scale >= 1e-30 else None

    def soft_keywords(self) -> dict[str, Any]:
        """As the operators for class probabilities take them, which know no ignore_index."""
        keywords = self.keywords()
        keywords.pop("ignore_index", None)
        return keywords


DEFAULTS = RowOptions()


class Activation(NamedTuple):
    """What makes x of a logit: for those who find it in code that is not ours."""

    softcap: float | None = DEFAULTS.softcap
    logit_scale: float = DEFAULTS.logit_scale

    def keywords(self) -> dict[str, Any]:
        """As operators take them, without those at their defaults."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}


class LossOptions(NamedTuple):
    """The options of a whole loss: those of its rows, the z-loss, the reduction."""

    row_options: RowOptions = DEFAULTS
    lse_square_scale: float = 0.0
    reduction: str = "mean"

    def keywords(self) -> dict[str, Any]:
        """As the composite and the reduced operators take them."""
        keywords = self.backward_keywords()
        if self.reduction != "mean":
            keywords["reduction"] = self.reduction
        return keywords

    def backward_keywords(self) -> dict[str, Any]:
        """As the backward of a reduced loss takes them."""
        keywords = self.row_options.keywords()
        if torch.compiler.is_compiling() or self.lse_square_scale != 0.0:
            keywords["lse_square_scale"] = self.lse_square_scale
        return keywords


HeadProducts = Literal["fp8", "fp8_gradients"]
"""What the products of a head multiply, where it is not what they are given: for type checkers."""
HEAD_PRODUCTS = get_args(HeadProducts)


class Chunking(NamedTuple):
    """How a head's logits are made: of which rows, how many at a time, in which dtype, by which products."""

    chunk_rows: int | None = None
    skip_ignored: bool = False
    logits_dtype: torch.dtype | None = None  # None: that of the input
    products: str | None = None

    def keywords(self) -> dict[str, Any]:
        """As operators take them."""
        return self._asdict()


DEFAULT_CHUNKING = Chunking()


def as_record(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of an operator's call with the options among them as one record, ``options``.

    The dispatcher leaves out what equals the schema's default.
    """
    remaining = dict(keywords)
    options = RowOptions(**{name: remaining.pop(name) for name in RowOptions._fields if name in keywords})
    return {"options": options, **remaining}
