"""The contestants of a whole training step: a loss is a function of (hidden states, the head's weight, target)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops

from . import linear_cases
from .linear_cases import LinearVariant

BODY = "body alone"

# quack-kernels tunes its products in the first call, for minutes.
PEERS = tuple(peer for peer in linear_cases.PEERS if peer.module != "quack")


@dataclass(frozen=True)
class ModelVariant(LinearVariant):
    """Where it is not ``compiled``, the body is, and the loss is called after it: it cannot be compiled in."""

    against: str = ""
    body_alone: bool = False  # no head and no loss, and nothing to check


def _no_head(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return hidden.float().mean()


def _torch(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, matrix).float(), target)


def _unfused(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return xent_ops.cross_entropy(F.linear(hidden, matrix), target)


def _linear(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return xent_ops.linear_cross_entropy(hidden, matrix, target)


def variants() -> tuple[list[ModelVariant], list[str]]:
    """(the contestants, what is left out and why)."""
    found = [
        ModelVariant(BODY, "torch", lambda: _no_head, compiled=True, body_alone=True),
        ModelVariant("F compiled", "torch", lambda: _torch, compiled=True),
        ModelVariant("xent pass", "ours", lambda: _torch, compiled=True, replaced=True),
        ModelVariant("xent compiled", "ours", lambda: _unfused, compiled=True),
        ModelVariant("xent linear", "ours", lambda: _linear, compiled=True),
    ]
    missing = []
    import torch._inductor.config as inductor

    if hasattr(inductor, "auto_chunker"):
        # Its thresholds ask for logits 8 times as large as head and hidden states together, which 16384 rows of Llama
        # 3.2 1B are not. Without them it takes the product that makes most of its inputs: the head.
        options = {f"auto_chunker.{name}_threshold": 0 for name in ("output_size", "amplify_ratio")}
        options["auto_chunker.enable"] = True
        found.append(
            ModelVariant("auto_chunker", "torch", lambda: _torch, compiled=True, inductor=options, auto_chunked=True)
        )
    else:
        missing.append(f"auto_chunker: not in the Inductor of torch {torch.__version__}")
    for peer in PEERS:
        if peer.installed():
            found.append(ModelVariant(peer.name, "peer", peer.load))
        else:
            missing.append(f"{peer.name}: not installed")
    return found, missing
