"""The options of a loss as one record, from the call to the launch."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch

from .sizes import symbolic

Reduction = Literal["none", "mean", "sum"]
"""The reductions of row losses, for type checkers."""


TokenReduction = Literal["mean", "sum"]
"""The reductions of a loss that is a function of tokens, for type checkers."""


class RowOptions(NamedTuple):
    """The options of a row's loss. Schemas and Triton signatures spell the fields out, in this order."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def keywords(self) -> dict[str, Any]:
        """The keywords of an operator. Defaults are left out: each keyword takes the dispatcher 0.4 us."""
        # A comparison would specialise a symbolic option. torch 2.11 also traces where is_compiling() is False.
        if torch.compiler.is_compiling() or symbolic(self.ignore_index):
            # Spelled out: Dynamo takes 90 steps for _asdict().
            return {
                "ignore_index": self.ignore_index,
                "label_smoothing": self.label_smoothing,
                "softcap": self.softcap,
                "logit_scale": self.logit_scale,
            }
        if self == DEFAULTS:
            return {}
        return {
            name: value
            for name, value, default in zip(RowOptions._fields, self, DEFAULTS, strict=True)
            if value != default
        }

    def kernel_arguments(self) -> tuple[int, float, float, float]:
        """The arguments of a kernel: a softcap of 0 is none."""
        return self.ignore_index, self.label_smoothing, self.softcap or 0.0, self.logit_scale

    @property
    def is_increasing(self) -> bool:
        """Does the largest logit have the largest x?"""
        return self.logit_scale > 0.0

    @property
    def plain_scale(self) -> float | None:
        """The logit scale, if it is positive (with a margin for float32) and the only option; else None."""
        plain = self.label_smoothing == 0.0 and self.softcap is None
        return self.logit_scale if plain and self.logit_scale >= 1e-30 else None

    def soft_keywords(self) -> dict[str, Any]:
        """The keywords of the operators for class probabilities: they have no ignore_index."""
        keywords = self.keywords()
        keywords.pop("ignore_index", None)
        return keywords


DEFAULTS = RowOptions()


class Activation(NamedTuple):
    """The softcap and scale that the pass and ``use_xent`` found in a model's code."""

    softcap: float | None = DEFAULTS.softcap
    logit_scale: float = DEFAULTS.logit_scale

    def keywords(self) -> dict[str, Any]:
        """The keywords of an operator, without defaults."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}


class LossOptions(NamedTuple):
    """The options of a whole loss: the rows', the z-loss, the reduction."""

    row_options: RowOptions = DEFAULTS
    lse_square_scale: float = 0.0
    reduction: str = "mean"

    def keywords(self) -> dict[str, Any]:
        """The keywords of the composite and the reduced operators."""
        keywords = self.backward_keywords()
        if self.reduction != "mean":
            keywords["reduction"] = self.reduction
        return keywords

    def backward_keywords(self) -> dict[str, Any]:
        """The keywords of a reduced loss' backward."""
        keywords = self.row_options.keywords()
        if torch.compiler.is_compiling() or self.lse_square_scale != 0.0:
            keywords["lse_square_scale"] = self.lse_square_scale
        return keywords

    def reduction_keywords(self) -> dict[str, Any]:
        """The keywords of the operators that reduce rows."""
        names = ("ignore_index", "lse_square_scale", "reduction")
        return {name: value for name, value in self.keywords().items() if name in names}


HeadProducts = Literal["fp8", "fp8_gradients"]
"""The 8-bit modes of a head's matrix multiplications, for type checkers."""
HEAD_PRODUCTS = get_args(HeadProducts)


class Chunking(NamedTuple):
    """The options for a head's logits: which rows to compute, the rows of a chunk, the dtype, the multiplication."""

    chunk_rows: int | None = None
    skip_ignored: bool = False
    logits_dtype: torch.dtype | None = None  # None: the input's dtype
    products: str | None = None
    batch_invariant: bool = False  # all chunks have one shape

    def keywords(self) -> dict[str, Any]:
        """The keywords of an operator. Spelled out, as those of RowOptions."""
        return {
            "chunk_rows": self.chunk_rows,
            "skip_ignored": self.skip_ignored,
            "logits_dtype": self.logits_dtype,
            "products": self.products,
            "batch_invariant": self.batch_invariant,
        }


DEFAULT_CHUNKING = Chunking()


def as_record(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of an operator's call, with the options combined into one record, ``options``.

    The dispatcher omits values that equal the schema's default.
    """
    remaining = dict(keywords)
    options = RowOptions(**{name: remaining.pop(name) for name in RowOptions._fields if name in keywords})
    return {"options": options, **remaining}
