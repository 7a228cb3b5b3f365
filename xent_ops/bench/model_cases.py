"""The contestants of a whole training step: a loss is a function of (hidden states, the head's weight, target)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import xent_ops

from . import linear_cases
from .cases import of_peers
from .linear_cases import LinearVariant, auto_chunked, unfused_ours, unfused_torch

BODY = "body alone"
LINEAR = "xent linear"

# Without those of CUTLASS: quack-kernels tunes its products in the first call, for minutes, and Liger-Kernel's takes
# whole tiles of rows and classes alone.
PEERS = tuple(peer for peer in linear_cases.PEERS if not peer.also)


@dataclass(frozen=True)
class ModelVariant(LinearVariant):
    """Where it is not ``compiled``, the body is, and the loss is called after it: it cannot be compiled in."""

    against: str = ""
    body_alone: bool = False  # no head and no loss, and nothing to check


def _no_head(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return hidden.float().mean()


def _skipping(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return xent_ops.linear_cross_entropy(hidden, matrix, target, skip_ignored=True)


def variants(dtype: torch.dtype) -> tuple[list[ModelVariant], list[str]]:
    """(the contestants, what is left out and why)."""
    found = [
        ModelVariant(BODY, "torch", lambda: _no_head, compiled=True, body_alone=True),
        ModelVariant("F compiled", "torch", lambda: unfused_torch, compiled=True),
        ModelVariant("xent pass", "ours", lambda: unfused_torch, compiled=True, replaced=True),
        ModelVariant("xent found head", "ours", lambda: unfused_torch, compiled=True, replaced=True, head=True),
        ModelVariant("xent compiled", "ours", lambda: unfused_ours, compiled=True),
        ModelVariant(LINEAR, "ours", lambda: xent_ops.linear_cross_entropy, compiled=True),
        ModelVariant("xent skipping", "ours", lambda: _skipping, compiled=True, against=LINEAR),
    ]
    if dtype in (torch.bfloat16, torch.float16):
        for products, tolerances in linear_cases.IN_8_BITS.items():
            loss = functools.partial(functools.partial, linear_cases.ours, products=products)
            how: dict[str, Any] = {"compiled": True, "against": LINEAR, "in_8_bits": tolerances}
            found.append(ModelVariant(f"xent {products}", "ours", loss, **how))
    # By itself it takes the product that makes most of its inputs: the head.
    chunked, missing = auto_chunked(ModelVariant, {"auto_chunker": {}})
    peers, absent = of_peers(ModelVariant, PEERS)
    return [*found, *chunked, *peers], [*missing, *absent]
