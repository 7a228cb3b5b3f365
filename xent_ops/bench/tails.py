"""What models compute between the product and the loss: compiled F.cross_entropy, with the pass, and our own call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import Variant, own, unweighted
from .check import IGNORE_INDEX, Options

SHAPES = {"cuda": "8192x65536", "cpu": "256x2048"}
HIDDEN = {"cuda": 1024, "cpu": 64}


@dataclass(frozen=True)
class Tail:
    """A loss as a model writes it, and the options that say the same."""

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]  # of logits and target
    softcap: float | None = None
    logit_scale: float = 1.0


def _gemma(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits / 30.0
    logits = torch.tanh(logits)
    logits = logits * 30.0
    return F.cross_entropy(logits.float(), target)


def _rows(logits: Tensor, target: Tensor) -> Tensor:
    """The mean of counted rows, by hand."""
    return F.cross_entropy(logits / 1.25, target, reduction="none").sum() / (target != IGNORE_INDEX).sum()


TAILS = (
    Tail("upcast", lambda x, t: F.cross_entropy(x.float(), t)),
    Tail("nanochat", lambda x, t: F.cross_entropy(15 * torch.tanh(x.float() / 15), t), softcap=15.0),
    Tail("Gemma 2", _gemma, softcap=30.0),
    Tail("Granite", lambda x, t: F.cross_entropy((x / 16.0).float(), t), logit_scale=1 / 16),
    Tail("Cohere", lambda x, t: F.cross_entropy((x * 0.0625).float(), t), logit_scale=0.0625),
    Tail("temperature, rows", _rows, logit_scale=1 / 1.25),
    Tail("nll_loss", lambda x, t: F.nll_loss(F.log_softmax(x.float(), -1), t)),
    # The operator has no shift: the pass leaves this alone.
    Tail("shift", lambda x, t: F.cross_entropy(x.float() + 1.0, t)),
)


def variants() -> list[Variant]:
    """Three for each tail, as steps from hidden states."""
    found = []
    for tail in TAILS:
        options = Options(softcap=tail.softcap, logit_scale=tail.logit_scale)
        written = functools.partial(unweighted, tail.loss)
        ours = functools.partial(own, softcap=tail.softcap, logit_scale=tail.logit_scale)
        # Inductor may write a tail's intermediate values to memory, in bfloat16.
        rounded = replace(options, slack=4.0)
        plain = Variant(f"{tail.name}: F compiled", "torch", written, rounded, compiled=True)
        call = Variant(f"{tail.name}: own call", "ours", ours, options, compiled=True, against=plain.name)
        found += [plain, replace(call, name=f"{tail.name}: pass", load=written, replaced=True), call]
    return found
