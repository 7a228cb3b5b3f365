"""The contestants: this package's variants, torch's, and each peer's public function.

A loss is a function of (logits, target, weight) that returns the mean over counted rows; weight is for those with
options. One that ``gives_grad`` returns (loss, gradient of the logits). Nothing of a peer is imported before its turn,
and what it raises is reported, not hidden.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops

from .. import inductor
from .check import IGNORE_INDEX, Options
from .outputs import Outputs

Loss = Callable[[Tensor, Tensor, Tensor], Any]

V = TypeVar("V", bound="Variant")

PLAIN = Options()
ALL_OPTIONS = Options(weighted=True, label_smoothing=0.1, softcap=30.0, lse_square_scale=1e-4)


@dataclass(frozen=True)
class Variant:
    name: str
    kind: str  # "ours", "torch" or "peer"
    load: Callable[[], Loss]  # imports what the loss needs
    options: Options = PLAIN
    compiled: bool = False
    dynamic: bool = False  # compiled for any number of rows
    in_place: bool = False  # needs logits that are not a leaf
    gives_grad: bool = False  # no autograd: returns loss and gradient
    products_only: bool = False  # a step without a loss
    mode: str | None = None  # of torch.compile
    replaced: bool = False  # compiled with the pass that replaces F.cross_entropy
    head: bool = False  # and the head with it
    opaque: bool = False  # compiled without our lowerings of the backward operators
    against: str = ""  # the variant whose time this one's is a ratio of

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self.compiled:
            return function
        if self.opaque:
            return torch.compile(function, fullgraph=True, backend=_opaque_inductor)
        if self.replaced:
            return torch.compile(function, fullgraph=True, options=inductor.options(linear=self.head))
        return torch.compile(function, fullgraph=True, mode=self.mode)

    def build(self) -> Loss:
        return self._compile(self.load())

    def build_step(self) -> Callable[..., Any]:
        """hidden, matrix, target, weight -> loss; with ``products_only``, -> Outputs."""
        if self.products_only:
            return _products_alone(self._compile(products))
        loss = self.load()

        def step(hidden: Tensor, matrix: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            return loss(hidden @ matrix.T, target, weight)

        return self._compile(step)


def _opaque_inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    from ..inductor.lowerings.decomposition import opaque_backward

    with opaque_backward():
        return compile_fx(graph, inputs)


def own(**options: Any) -> Loss:
    return lambda logits, target, weight: xent_ops.cross_entropy(logits, target, **options)


def unweighted(loss: Callable[[Tensor, Tensor], Any]) -> Loss:
    return lambda logits, target, weight: loss(logits, target)


def _ours_with_grad(logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The operator itself, as a graph of one's own would call it."""
    scale = 1 / (target != IGNORE_INDEX).sum().to(torch.float32)
    loss, *_, grad = torch.ops.xent.cross_entropy_with_grad(logits, target, scale)
    return loss.sum() * scale, grad


def _ours_options(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return xent_ops.cross_entropy(
        logits,
        target,
        weight,
        label_smoothing=ALL_OPTIONS.label_smoothing,
        softcap=ALL_OPTIONS.softcap,
        lse_square_scale=ALL_OPTIONS.lse_square_scale,
    )


def _torch(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def _torch_upcast(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def _torch_options(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The same loss as ``_ours_options``, written as one writes it today."""
    cap = ALL_OPTIONS.softcap
    assert cap is not None
    x = cap * torch.tanh(logits.float() / cap)
    counted = target != IGNORE_INDEX
    lse = torch.where(counted, torch.logsumexp(x, 1), 0.0)
    loss = F.cross_entropy(x, target, weight, label_smoothing=ALL_OPTIONS.label_smoothing)
    return loss + ALL_OPTIONS.lse_square_scale * lse.square().sum() / counted.sum()


def products(hidden: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The three matrix products of a step, the logits standing in for their gradient: it has their shape and dtype."""
    logits = hidden @ matrix.T
    return logits @ matrix, logits.T @ hidden


def _products_alone(products: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Outputs]:
    def step(hidden: Tensor, matrix: Tensor, target: Tensor, weight: Tensor) -> Outputs:
        return Outputs(hidden.new_zeros(()), products(hidden, matrix))

    return step


def imported(module: str, name: str, **options: Any) -> Callable[..., Any]:
    return functools.partial(getattr(importlib.import_module(module), name), **options)


def _liger() -> Loss:
    return unweighted(imported("liger_kernel.transformers.functional", "liger_cross_entropy"))


def _quack() -> Loss:
    return unweighted(imported("quack.cross_entropy", "cross_entropy", reduction="mean"))


def _flash_attention() -> Loss:
    return unweighted(imported("flash_attn.losses.cross_entropy", "CrossEntropyLoss")())


def _transformer_engine() -> Loss:
    parallel = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy

    # Versions without overwrite_input synchronise unless is_cg_capturable says not to; later ones warn of it.
    capturable = () if "overwrite_input" in inspect.signature(parallel).parameters else (True,)
    # (batch, sequence, classes); by position, for the names changed: label_smoothing, reduce_loss,
    # dist_process_group, ignore_idx, is_cg_capturable.
    return lambda logits, target, weight: parallel(
        logits.unsqueeze(0), target.unsqueeze(0), 0.0, True, None, IGNORE_INDEX, *capturable
    )


@dataclass(frozen=True)
class Peer:
    distributions: tuple[str, ...]  # names its version is found under; the first is the name shown
    module: str
    load: Callable[[], Loss]
    also_compiled: bool = False  # it promises to compile
    label: str = ""  # the name shown, where a distribution has several losses
    also: tuple[tuple[str, str], ...] = ()  # (distribution, module) of what else it imports

    @property
    def name(self) -> str:
        return self.label or self.distributions[0]

    def missing(self) -> list[str]:
        """The distributions that are not installed."""
        needed = ((self.distributions[0], self.module), *self.also)
        return [distribution for distribution, module in needed if importlib.util.find_spec(module) is None]

    def installed(self) -> bool:
        return not self.missing()


PEERS = (
    Peer(("liger-kernel", "liger-kernel-nightly"), "liger_kernel", _liger),
    Peer(("quack-kernels",), "quack", _quack, also_compiled=True),
    Peer(("flash-attn",), "flash_attn", _flash_attention),
    Peer(("transformer-engine", "transformer-engine-torch"), "transformer_engine", _transformer_engine),
)


def _peers() -> list[Variant]:
    found = []
    for peer in filter(Peer.installed, PEERS):
        found.append(Variant(peer.name, "peer", peer.load))
        if peer.also_compiled:
            found.append(Variant(f"{peer.name} compiled", "peer", peer.load, compiled=True))
    return found


def of_peers(kind: type[V], peers: Sequence[Peer]) -> tuple[list[V], list[str]]:
    """(those that are installed, a line for each that is not)."""
    found = [kind(peer.name, "peer", peer.load) for peer in peers if peer.installed()]
    absent = [(peer, peer.missing()) for peer in peers]
    return found, [
        f"{peer.name}: not installed" + (f" ({', '.join(missing)})" if peer.also else "")
        for peer, missing in absent
        if missing
    ]


_with_grad_in_place = functools.partial(own, grad_in_forward=True, inplace_backward=True)


def losses(dtype: torch.dtype, device: torch.device, dynamic: bool) -> list[Variant]:
    """For logits that are given. Compiled F.cross_entropy upcasts in its kernels, so that is the form to beat."""
    ours = Variant("xent compiled", "ours", own, compiled=True)
    upcast = Variant("F compiled", "torch", lambda: _torch_upcast, compiled=True)
    found = [Variant("xent eager", "ours", own), ours]
    if dynamic:
        found.append(replace(ours, name="xent compiled dynamic", dynamic=True))
    found += [
        Variant("xent in-place", "ours", functools.partial(own, inplace_backward=True), in_place=True),
        Variant("xent one pass", "ours", functools.partial(own, grad_in_forward=True)),
        Variant(
            "xent one pass in-place", "ours", lambda: own(grad_in_forward=True, inplace_backward=True), in_place=True
        ),
        Variant("xent one pass compiled", "ours", lambda: _ours_with_grad, compiled=True, gives_grad=True),
        Variant("xent compiled options", "ours", lambda: _ours_options, ALL_OPTIONS, compiled=True),
        Variant("F eager", "torch", lambda: _torch),
    ]
    if dtype in (torch.bfloat16, torch.float16):
        found.append(Variant("F eager float32", "torch", lambda: _torch_upcast))
    found.append(upcast)
    if device.type == "cuda":
        found.append(replace(upcast, name="F max-autotune", mode="max-autotune-no-cudagraphs"))
    if dynamic:
        found.append(replace(upcast, name="F compiled dynamic", dynamic=True))
    found.append(Variant("F compiled options", "torch", lambda: _torch_options, ALL_OPTIONS, compiled=True))
    return found + _peers()


def steps(dynamic: bool) -> list[Variant]:
    """For hidden @ W.T -> loss -> backward: what compiles, and eager in place for its memory.

    The opaque backward shows what it costs or saves that the compiled gradient is written over the logits.
    """
    opaque = Variant("xent opaque backward", "ours", own, compiled=True, opaque=True)
    ours = Variant("xent compiled", "ours", own, compiled=True, against=opaque.name)
    upcast = Variant("F compiled", "torch", lambda: _torch_upcast, compiled=True)
    found = [
        Variant("products alone", "torch", lambda: _torch, compiled=True, products_only=True),
        ours,
        opaque,
        Variant("xent in-place", "ours", functools.partial(own, inplace_backward=True), in_place=True),
        Variant(
            "xent one pass in-place", "ours", lambda: own(grad_in_forward=True, inplace_backward=True), in_place=True
        ),
        upcast,
    ]
    if dynamic:
        opaque = replace(opaque, name="xent opaque backward dynamic", dynamic=True)
        found += [
            replace(ours, name="xent compiled dynamic", dynamic=True, against=opaque.name),
            opaque,
            replace(upcast, name="F compiled dynamic", dynamic=True),
        ]
    return found + [variant for variant in _peers() if variant.compiled]


def choose(known: Sequence[V], only: str | None, peers: Sequence[Peer], missing: Sequence[str] = ()) -> list[V]:
    """Those with one of the words of ``only`` in their names; says which peers are missing.

    ``missing``: lines on what is left out, said where all are wanted.
    """
    if only is None:
        for line in missing:
            print(f"left out: {line}", file=sys.stderr)
        return list(known)
    words = [word for word in map(str.strip, only.split(",")) if word]
    if not words:
        raise ValueError("--only: name at least one variant, or leave it out")
    for word in words:
        if not any(word in variant.name for variant in known):
            absent = [peer.name for peer in peers if word in peer.name and not peer.installed()]
            if not absent:
                names = ", ".join(variant.name for variant in known)
                raise ValueError(f"--only {word}: no variant has this in its name; here are {names}")
            print(f"--only {word}: {', '.join(absent)} is not installed, and left out", file=sys.stderr)
    chosen = [variant for variant in known if any(word in variant.name for word in words)]
    if not chosen:
        raise ValueError(f"--only {only}: none of these is installed")
    return chosen
