"""The functions to compare: this package's, torch's, and each peer's public function.

A peer is imported only when its turn comes. Its errors are reported, not hidden.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops

from .check import IGNORE_INDEX, PLAIN, Options

# A problem's tensors -> the mean loss over the rows that are not ignored, or Outputs. The tensors are (logits, target,
# class weights) or (hidden, matrix, target, *further tensors with one value for each row).
Function = Callable[..., Any]

COPY, THREE_MATMULS = "copy", "three matmuls"


class Outputs(NamedTuple):
    """The result of a step. A function returns it too if it computes its own gradients."""

    loss: Tensor  # ()
    grads: tuple[Tensor, ...]


@dataclass(frozen=True)
class Contestant:
    name: str
    kind: str  # "ours", "torch" or "peer"
    load: Callable[[], Function]  # imports what it needs
    against: str = ""  # the name of the unit: the ratio is this time to that of the unit
    unit: str = ""  # it may be the unit of this name; the fastest such line is
    options: Options = PLAIN
    slack: float = 1.0  # factor of the tolerances
    in_8_bits: tuple[float, float] | None = None  # tolerances of gradients and loss, for products of 8-bit numbers
    captured: bool = True  # in a CUDA graph, if the others are
    confirm: Callable[[], str] = str  # called after the first step: a note, or an error


_numbers = itertools.count()


def compiled(load: Callable[[], Function], **options: Any) -> Callable[[], Function]:
    """Compile ``load()`` with its own code object, because torch.compile stores graphs and dynamic sizes by code."""

    def load_compiled() -> Function:
        function = load()

        def call(*tensors: Tensor) -> Any:
            return function(*tensors)

        call.__code__ = call.__code__.replace(co_name=f"call_{next(_numbers)}")
        return torch.compile(call, fullgraph=True, **options)

    return load_compiled


def own(**options: Any) -> Function:
    return lambda logits, target, weight: xent_ops.cross_entropy(logits, target, **options)


def torch_loss(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def torch_loss_upcast(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """F.cross_entropy of upcast logits. Compiled, the upcast is part of the kernels: this is the form to beat."""
    return F.cross_entropy(logits.float(), target)


def copies() -> list[Contestant]:
    """Copy the logits in two ways. The driver's copy is slow from 2^30 bytes on (H200), a kernel's for few bytes."""

    def copy(run: Callable[[Tensor, Tensor], object]) -> Function:
        kept: list[Tensor] = []

        def step(logits: Tensor, target: Tensor, weight: Tensor) -> Outputs:
            if not kept:
                kept.append(torch.empty_like(logits))
            run(kept[0], logits.detach())
            return Outputs(logits.new_zeros(()), ())

        return step

    ways: dict[str, Callable[[Tensor, Tensor], object]] = {
        "copy": lambda out, x: out.copy_(x),
        "copy by a kernel": lambda out, x: torch.neg(x, out=out),
    }
    return [Contestant(name, "torch", functools.partial(copy, run), unit=COPY) for name, run in ways.items()]


def losses() -> list[Contestant]:
    """The contestants for a loss of logits."""
    return [
        *copies(),
        Contestant("xent eager", "ours", own, COPY),
        Contestant("xent compiled", "ours", compiled(own), COPY),
        Contestant("xent one pass", "ours", functools.partial(own, grad_in_forward=True), COPY),
        Contestant("F eager", "torch", lambda: torch_loss, COPY),
        Contestant("F compiled", "torch", compiled(lambda: torch_loss_upcast), COPY),
        *installed(PEERS, COPY),
    ]


def products(hidden: Tensor, matrix: Tensor, *_: Tensor) -> Outputs:
    """The three matrix products of a step. The logits replace their gradient, which has the same shape and dtype."""
    hidden, matrix = hidden.detach(), matrix.detach()
    logits = hidden @ matrix.T
    return Outputs(hidden.new_zeros(()), (logits @ matrix, logits.T @ hidden))


def linear(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Tensor:
    return xent_ops.linear_cross_entropy(hidden, matrix, target, **options)


def unfused_torch(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, matrix).float(), target)


def _torch_chunked() -> Function:
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    return lambda hidden, matrix, target: F.linear_cross_entropy(  # type: ignore[attr-defined, unused-ignore]
        hidden, matrix, target, options=options
    )


def heads() -> list[Contestant]:
    """The contestants for a loss of hidden states and the head's weight."""
    found = [
        Contestant("three matmuls", "torch", lambda: products, unit=THREE_MATMULS),
        Contestant("xent eager", "ours", lambda: linear, THREE_MATMULS),
        Contestant("xent compiled", "ours", compiled(lambda: linear), THREE_MATMULS),
        Contestant("unfused F compiled", "torch", compiled(lambda: unfused_torch), THREE_MATMULS),
    ]
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # from torch 2.13 on
        found.append(Contestant("F.linear_cross_entropy", "torch", _torch_chunked, THREE_MATMULS))
    return found + installed(LINEAR_PEERS, THREE_MATMULS)


def imported(module: str, name: str, **options: Any) -> Function:
    return functools.partial(getattr(importlib.import_module(module), name), **options)


def unweighted(load: Callable[[], Function]) -> Callable[[], Function]:
    def load_it() -> Function:
        loss = load()
        return lambda logits, target, weight: loss(logits, target)

    return load_it


def _transformer_engine() -> Function:
    parallel = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy

    # Versions without overwrite_input synchronise unless is_cg_capturable says not to; later ones warn of it.
    capturable = () if "overwrite_input" in inspect.signature(parallel).parameters else (True,)
    # The logits are (batch, sequence, classes). Arguments go by position because their names changed between versions:
    # label_smoothing, reduce_loss, dist_process_group, ignore_idx, is_cg_capturable.
    return lambda logits, target, weight: parallel(
        logits.unsqueeze(0), target.unsqueeze(0), 0.0, True, None, IGNORE_INDEX, *capturable
    )


@dataclass(frozen=True)
class Peer:
    distributions: tuple[str, ...]  # names to look up its version; the first is the name shown
    module: str
    load: Callable[[], Function]
    label: str = ""  # the name shown, if a distribution has several losses
    also: tuple[tuple[str, str], ...] = ()  # (distribution, module) of its other imports

    @property
    def name(self) -> str:
        return self.label or self.distributions[0]

    def missing(self) -> list[str]:
        """The distributions that are not installed."""
        needed = ((self.distributions[0], self.module), *self.also)
        return [distribution for distribution, module in needed if importlib.util.find_spec(module) is None]


LIGER = (("liger-kernel", "liger-kernel-nightly"), "liger_kernel")
CUTLASS = ("nvidia-cutlass-dsl", "cutlass")
PEERS = (
    Peer(*LIGER, unweighted(lambda: imported("liger_kernel.transformers.functional", "liger_cross_entropy"))),
    Peer(
        ("quack-kernels",),
        "quack",
        unweighted(lambda: imported("quack.cross_entropy", "cross_entropy", reduction="mean")),
    ),
    Peer(
        ("flash-attn",),
        "flash_attn",
        unweighted(lambda: imported("flash_attn.losses.cross_entropy", "CrossEntropyLoss")()),
    ),
    Peer(("transformer-engine", "transformer-engine-torch"), "transformer_engine", _transformer_engine),
)
LINEAR_PEERS = (
    Peer(*LIGER, lambda: imported("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")),
    Peer(("cut-cross-entropy",), "cut_cross_entropy", lambda: imported("cut_cross_entropy", "linear_cross_entropy")),
    # It tunes its products in the first call, for minutes.
    Peer(
        ("quack-kernels",),
        "quack",
        lambda: imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
        also=(CUTLASS, ("apache-tvm-ffi", "tvm_ffi")),
    ),
)


def installed(peers: Sequence[Peer], against: str) -> list[Contestant]:
    return [Contestant(peer.name, "peer", peer.load, against) for peer in peers if not peer.missing()]


def choose(tables: Sequence[Sequence[Contestant]], only: str | None, peers: Sequence[Peer]) -> list[list[Contestant]]:
    """The lines of each table whose names have one of the words in ``only``, and the units of their ratios."""
    words = [word.strip() for word in (only or "").split(",") if word.strip()]
    names = list(dict.fromkeys(contestant.name for known in tables for contestant in known))
    if only is not None and not words:
        raise ValueError("--only: name at least one line, or leave it out")
    for word in words:
        if not any(word in name for name in names):
            absent = [peer.name for peer in peers if word in peer.name and peer.missing()]
            if not absent:
                raise ValueError(f"--only {word}: no line has this in its name; here are {', '.join(names)}")
            print(f"--only {word}: {', '.join(absent)} is not installed, and left out", file=sys.stderr)
    found = []
    for known in tables:
        chosen = [one for one in known if not words or any(word in one.name for word in words)]
        units = {contestant.against for contestant in chosen} - {""}
        found.append([one for one in known if chosen and (one in chosen or one.unit in units)])
    if not any(found):
        raise ValueError(f"--only {only}: none of these is installed")
    return found
