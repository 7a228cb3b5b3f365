"""All forms of the loss of logits, and steps from hidden states with the operations of models before the loss."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops
from xent_ops import inductor
from xent_ops.bench.check import IGNORE_INDEX, Options
from xent_ops.bench.contestants import (
    COPY,
    PEERS,
    THREE_MATMULS,
    Contestant,
    Function,
    Outputs,
    Peer,
    compiled,
    installed,
    own,
    products,
    torch_loss_upcast,
)
from xent_ops.bench.contestants import losses as common
from xent_ops.bench.problems import produced
from xent_ops.bench.run import Setting, Table, head_tables, loss_tables

ALL_OPTIONS = Options(weighted=True, label_smoothing=0.1, softcap=30.0, lse_square_scale=1e-4)


def in_place(**options: Any) -> Function:
    """Our loss with its gradient written over the logits, which are no leaf."""
    loss = own(inplace_backward=True, **options)
    return lambda logits, target, weight: loss(produced(logits), target, weight)


def with_grad(logits: Tensor, target: Tensor, weight: Tensor) -> Outputs:
    """The operator itself, as a user's own graph would call it."""
    scale = 1 / (target != IGNORE_INDEX).sum().to(torch.float32)
    loss, *_, grad = torch.ops.xent.cross_entropy_with_grad(logits.detach(), target, scale)
    return Outputs(loss.sum() * scale, (grad,))


def own_options(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return xent_ops.cross_entropy(
        logits,
        target,
        weight,
        label_smoothing=ALL_OPTIONS.label_smoothing,
        softcap=ALL_OPTIONS.softcap,
        lse_square_scale=ALL_OPTIONS.lse_square_scale,
    )


def torch_options(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The same loss as ``own_options``, written with torch's functions."""
    cap = ALL_OPTIONS.softcap
    assert cap is not None
    x = cap * torch.tanh(logits.float() / cap)
    counted = target != IGNORE_INDEX
    lse = torch.where(counted, torch.logsumexp(x, 1), 0.0)
    loss = F.cross_entropy(x, target, weight, label_smoothing=ALL_OPTIONS.label_smoothing)
    return loss + ALL_OPTIONS.lse_square_scale * lse.square().sum() / counted.sum()


def torch_loss_with_pass() -> Function:
    """The pass, with a new report for this contestant."""
    return compiled(lambda: torch_loss_upcast, options=inductor.options(linear=False))()


def any_rows(load: Callable[[], Function], **options: Any) -> Callable[[], Function]:
    """Compile ``load()`` for any number of rows."""

    def load_compiled() -> Function:
        function = compiled(load, **options)()

        def call(rows: Tensor, second: Tensor, third: Tensor) -> Any:
            for tensor in (rows, second, third):
                if len(tensor) == len(rows):
                    torch._dynamo.mark_dynamic(tensor, 0)
            return function(rows, second, third)

        return call

    return load_compiled


def of_logits(dtype: torch.dtype, device: torch.device, dynamic: bool) -> list[Contestant]:
    one_pass_in_place = functools.partial(in_place, grad_in_forward=True)
    load_upcast: Callable[[], Function] = lambda: torch_loss_upcast  # noqa: E731
    found = [
        *(contestant for contestant in common() if contestant.kind != "peer"),
        Contestant("xent in-place", "ours", in_place, COPY),
        Contestant("xent one pass in-place", "ours", one_pass_in_place, COPY),
        Contestant("xent one pass compiled", "ours", compiled(lambda: with_grad), COPY),
        Contestant("xent compiled options", "ours", compiled(lambda: own_options), COPY, options=ALL_OPTIONS),
        Contestant("F compiled options", "torch", compiled(lambda: torch_options), COPY, options=ALL_OPTIONS),
        Contestant("F compiled with the pass", "ours", torch_loss_with_pass, COPY, confirm=left),
    ]
    if dtype in (torch.bfloat16, torch.float16):
        found.append(Contestant("F eager float32", "torch", load_upcast, COPY))
    if device.type == "cuda":
        autotuned = compiled(load_upcast, mode="max-autotune-no-cudagraphs")
        found.append(Contestant("F max-autotune", "torch", autotuned, COPY))
    if dynamic:
        found.append(Contestant("xent compiled dynamic", "ours", any_rows(own), COPY))
        found.append(Contestant("F compiled dynamic", "torch", any_rows(load_upcast), COPY))
    peers = installed(PEERS, COPY)
    quack = [
        replace(peer, name=f"{peer.name} compiled", load=compiled(peer.load)) for peer in peers if "quack" in peer.name
    ]
    return [*found, *peers, *quack]


def losses(arguments: argparse.Namespace, setting: Setting) -> tuple[list[Table], Sequence[Peer]]:
    known = of_logits(setting.dtype, setting.device, arguments.dynamic)
    return loss_tables(arguments.shapes, known, setting), PEERS


def opaque_inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    from .opaque import opaque_backward

    with opaque_backward():
        return compile_fx(graph, inputs)


def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Function]:
    """A step that computes all logits. They are no input, so a gradient may be written over them."""
    return lambda: lambda hidden, matrix, target: loss(hidden @ matrix.T, target)


def steps(arguments: argparse.Namespace, setting: Setting) -> tuple[list[Table], Sequence[Peer]]:
    """Compiled steps. The opaque backward is the baseline for a compiled gradient written over the logits."""
    ours = step(xent_ops.cross_entropy)
    upcast = step(lambda logits, target: F.cross_entropy(logits.float(), target))
    written = functools.partial(xent_ops.cross_entropy, inplace_backward=True)
    lines: list[tuple[str, str, Callable[[], Function]]] = [
        ("xent compiled", "ours", compiled(ours)),
        ("xent opaque backward", "ours", compiled(ours, backend=opaque_inductor)),
        ("xent in-place", "ours", step(written)),
        ("xent one pass in-place", "ours", step(functools.partial(written, grad_in_forward=True))),
        ("F compiled", "torch", compiled(upcast)),
    ]
    if arguments.dynamic:
        lines += [
            ("xent compiled dynamic", "ours", any_rows(ours)),
            ("xent opaque backward dynamic", "ours", any_rows(ours, backend=opaque_inductor)),
            ("F compiled dynamic", "torch", any_rows(upcast)),
        ]
    unit = Contestant(THREE_MATMULS, "torch", lambda: products, unit=THREE_MATMULS)
    known = [unit, *(Contestant(*line, against=THREE_MATMULS) for line in lines)]
    return head_tables(arguments.shapes, arguments.hidden, known, setting), ()


def gemma(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits / 30.0
    logits = torch.tanh(logits)
    logits = logits * 30.0
    return F.cross_entropy(logits.float(), target)


def by_rows(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over the rows that are not ignored, without F.cross_entropy's own mean."""
    return F.cross_entropy(logits / 1.25, target, reduction="none").sum() / (target != IGNORE_INDEX).sum()


# A loss as models write it, and the equivalent options.
TAILS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Options]] = {
    "upcast": (lambda x, t: F.cross_entropy(x.float(), t), Options()),
    "nanochat": (lambda x, t: F.cross_entropy(15 * torch.tanh(x.float() / 15), t), Options(softcap=15.0)),
    "Gemma 2": (gemma, Options(softcap=30.0)),
    "Granite": (lambda x, t: F.cross_entropy((x / 16.0).float(), t), Options(logit_scale=1 / 16)),
    "Cohere": (lambda x, t: F.cross_entropy((x * 0.0625).float(), t), Options(logit_scale=0.0625)),
    "temperature, rows": (by_rows, Options(logit_scale=1 / 1.25)),
    "nll_loss": (lambda x, t: F.nll_loss(F.log_softmax(x.float(), -1), t), Options()),
    # The operator has no shift: the pass leaves this alone.
    "shift": (lambda x, t: F.cross_entropy(x.float() + 1.0, t), Options()),
}


def left(head: bool = False) -> str:
    """The losses that the pass should have replaced but did not; with ``head``, also the heads."""
    notes = []
    for call in inductor.last_report().calls:
        if not call.replaced:
            notes.append(f"left alone: {call.why}")
        elif head and not call.head:
            notes.append(f"head left alone: {call.head_left or 'not found'}")
    return "; ".join(notes)


def tails(arguments: argparse.Namespace, setting: Setting) -> tuple[list[Table], Sequence[Peer]]:
    """Three lines for each tail: compiled F.cross_entropy, the same with the pass, and our own call."""
    found = []
    for name, (loss, options) in TAILS.items():
        ours = functools.partial(xent_ops.cross_entropy, softcap=options.softcap, logit_scale=options.logit_scale)
        with_pass = compiled(step(loss), options=inductor.options(linear=False))
        # The slack is for Inductor, which may write a tail's intermediate values to memory in bfloat16.
        how: dict[str, Any] = {"against": THREE_MATMULS, "options": options, "slack": 4.0}
        known = [
            Contestant(THREE_MATMULS, "torch", lambda: products, unit=THREE_MATMULS),
            Contestant(f"{name}: F compiled", "torch", compiled(step(loss)), **how),
            Contestant(f"{name}: pass", "ours", with_pass, confirm=left, **how),
            Contestant(f"{name}: own call", "ours", compiled(step(ours)), **how | {"slack": 1.0}),
        ]
        for table in head_tables(arguments.shapes, arguments.hidden, known, setting):
            found.append(replace(table, name=f"{name}, {table.name}"))
    return found, ()
