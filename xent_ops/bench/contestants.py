"""The functions to compare: this package's, torch's, and each peer's public function.

A peer is imported only when its turn comes. Its errors are reported, not hidden.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops

from .check import IGNORE_INDEX, Options

# A problem's tensors -> the mean loss over the rows that are not ignored, or Outputs. The tensors are (logits, target)
# or (hidden, matrix, target, *further tensors with one value for each row), and class weights if the options name them.
Function = Callable[..., Any]
Load = Callable[[], Function]  # imports what the function needs

COPY, THREE_MATMULS = "copy", "three matmuls"


class Outputs(NamedTuple):
    """The result of a step. A function returns it too if it computes its own gradients."""

    loss: Tensor  # ()
    grads: tuple[Tensor, ...]


@dataclass(frozen=True)
class Contestant:
    name: str
    kind: str  # "unit", "ours", "torch" or "peer"; a unit is not checked
    load: Load
    needs: tuple[str, ...] = ()  # modules; the first is that of the peer itself
    against: str = ""  # the ratio is to the fastest unit whose name begins so; default: the problem's
    options: Options = field(default_factory=dict)
    slack: float = 1.0  # factor of the tolerances
    in_8_bits: tuple[float, float] = (0.0, 0.0)  # more tolerance of gradients and loss, for products of 8-bit numbers
    captured: bool = True  # in a CUDA graph, if the others are
    listed: bool = False  # also where a module is missing, as NOT RUN
    confirm: Callable[[], str] = str  # called after the first step: a note, or an error

    def missing(self) -> list[str]:
        return [module for module in self.needs if importlib.util.find_spec(module) is None]


_numbers = itertools.count()


def compiled(load: Load, **options: Any) -> Load:
    """Compile ``load()`` with its own code object, because torch.compile stores graphs and dynamic sizes by code."""

    def load_compiled() -> Function:
        function = load()

        def call(*tensors: Tensor) -> Any:
            return function(*tensors)

        call.__code__ = call.__code__.replace(co_name=f"call_{next(_numbers)}")
        return torch.compile(call, fullgraph=True, **options)

    return load_compiled


def imported(module: str, name: str, **options: Any) -> Load:
    return lambda: functools.partial(getattr(importlib.import_module(module), name), **options)


def partial(function: Function, *args: Any, **options: Any) -> Load:
    return lambda: functools.partial(function, *args, **options)


def unit(name: str, load: Load) -> Contestant:
    """The time of a function on the problem's tensors. The tensors of a tuple that it returns count as gradients."""

    def load_step() -> Function:
        work = load()

        def step(*tensors: Tensor) -> Outputs:
            with torch.no_grad():
                found = work(*tensors)
            return Outputs(tensors[0].new_zeros(()), found if isinstance(found, tuple) else ())

        return step

    return Contestant(name, "unit", load_step)


def copies() -> list[Contestant]:
    """Copy the logits in two ways. The driver's copy is slow from 2^30 bytes on (H200), a kernel's for few bytes."""

    def load(copy: Callable[[Tensor, Tensor], object]) -> Function:
        out = functools.cache(torch.empty_like)  # one buffer for each problem
        return lambda logits, *_: copy(out(logits), logits)

    return [
        unit("copy", lambda: load(lambda out, x: out.copy_(x))),
        unit("copy by a kernel", lambda: load(lambda out, x: torch.neg(x, out=out))),
    ]


def products(hidden: Tensor, matrix: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    """The three matrix products of a step. The logits replace their gradient, which has the same shape and dtype."""
    logits = hidden @ matrix.T
    return logits @ matrix, logits.T @ hidden


def torch_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def torch_loss_upcast(logits: Tensor, target: Tensor) -> Tensor:
    """F.cross_entropy of upcast logits. Compiled, the upcast is part of the kernels: this is the form to beat."""
    return F.cross_entropy(logits.float(), target)


def linear(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Tensor:
    return xent_ops.linear_cross_entropy(hidden, matrix, target, **options)


def unfused_torch(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, matrix).float(), target)


def _torch_chunked() -> Function:
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    return functools.partial(F.linear_cross_entropy, options=options)  # type: ignore[attr-defined, unused-ignore]


def _transformer_engine() -> Function:
    parallel = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    # The logits are (batch, sequence, classes). Arguments go by position because their names changed between versions:
    # label_smoothing, reduce_loss, dist_process_group, ignore_idx, and that a CUDA graph will capture the call.
    return lambda logits, target: parallel(logits[None], target[None], 0.0, True, None, IGNORE_INDEX, True)


def losses() -> list[Contestant]:
    """The contestants for a loss of logits."""
    ours = partial(xent_ops.cross_entropy)
    quack = imported("quack.cross_entropy", "cross_entropy", reduction="mean")
    flash_attn: Load = lambda: imported("flash_attn.losses.cross_entropy", "CrossEntropyLoss")()()  # noqa: E731
    liger = imported("liger_kernel.transformers.functional", "liger_cross_entropy")
    return [
        *copies(),
        Contestant("xent eager", "ours", ours),
        Contestant("xent compiled", "ours", compiled(ours)),
        Contestant("xent one pass", "ours", partial(xent_ops.cross_entropy, grad_in_forward=True)),
        Contestant("F eager", "torch", lambda: torch_loss),
        Contestant("F compiled", "torch", compiled(lambda: torch_loss_upcast)),
        Contestant("liger-kernel", "peer", liger, ("liger_kernel",)),
        Contestant("quack-kernels", "peer", quack, ("quack",)),
        Contestant("flash-attn", "peer", flash_attn, ("flash_attn",)),
        Contestant("transformer-engine", "peer", _transformer_engine, ("transformer_engine",)),
    ]


def heads() -> list[Contestant]:
    """The contestants for a loss of hidden states and the head's weight."""
    liger = imported("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    cut = imported("cut_cross_entropy", "linear_cross_entropy")
    quack = imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    found = [
        unit(THREE_MATMULS, lambda: products),
        Contestant("xent eager", "ours", lambda: linear),
        Contestant("xent compiled", "ours", compiled(lambda: linear)),
        Contestant("unfused F compiled", "torch", compiled(lambda: unfused_torch)),
        Contestant("liger-kernel", "peer", liger, ("liger_kernel",)),
        Contestant("cut-cross-entropy", "peer", cut, ("cut_cross_entropy",)),
        # It tunes its products in the first call, for minutes.
        Contestant("quack-kernels", "peer", quack, ("quack", "cutlass", "tvm_ffi")),
    ]
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # from torch 2.13 on
        found.insert(4, Contestant("F.linear_cross_entropy", "torch", _torch_chunked))
    return found


def choose(known: Sequence[Contestant], only: str | None) -> list[Contestant]:
    """The units, and the lines whose names have one of the words in ``only``, if they are installed or listed."""
    words = [""] if only is None else [word.strip() for word in only.split(",")]
    for word in words:
        if only is not None and not (word and any(word in one.name for one in known)):
            names = ", ".join(one.name for one in known)
            raise ValueError(f"--only {word!r}: no line has this in its name; here are {names}")
    found = [one for one in known if one.listed or not one.missing()]
    return [one for one in found if one.kind == "unit" or any(word in one.name for word in words)]
