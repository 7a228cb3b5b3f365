"""All forms of the loss of logits, and steps from hidden states with the operations of models before the loss."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops
from xent_ops import inductor
from xent_ops.bench import contestants
from xent_ops.bench.check import IGNORE_INDEX, Options
from xent_ops.bench.contestants import (
    THREE_MATMULS,
    Contestant,
    Function,
    Load,
    Outputs,
    compiled,
    partial,
    products,
    torch_loss_upcast,
    unit,
)
from xent_ops.bench.problems import Head, Loss, Setting
from xent_ops.bench.run import Table, tables_of

ALL_OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 30.0, "lse_square_scale": 1e-4}


class _Produced(torch.autograd.Function):
    """Returns its input like the output of a layer: it is no leaf, so its gradient may be written over it.

    It is no view either. After a write in place, autograd moves a view in the graph, and no gradient would reach it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def in_place(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Our loss with its gradient written over the logits."""
    return xent_ops.cross_entropy(_Produced.apply(logits), target, inplace_backward=True, **options)


def with_grad(logits: Tensor, target: Tensor) -> Outputs:
    """The operator itself, as a user's own graph would call it."""
    scale = 1 / (target != IGNORE_INDEX).sum().to(torch.float32)
    loss, *_, grad = torch.ops.xent.cross_entropy_with_grad(logits.detach(), target, scale)
    return Outputs(loss.sum() * scale, (grad,))


def torch_options(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The loss with ALL_OPTIONS and class weights, written with torch's functions."""
    cap = ALL_OPTIONS["softcap"]
    x = cap * torch.tanh(logits.float() / cap)
    counted = target != IGNORE_INDEX
    lse = torch.where(counted, torch.logsumexp(x, 1), 0.0)
    loss = F.cross_entropy(x, target, weight, label_smoothing=ALL_OPTIONS["label_smoothing"])
    return loss + ALL_OPTIONS["lse_square_scale"] * lse.square().sum() / counted.sum()


def any_rows(load: Load, **options: Any) -> Load:
    """Compile ``load()`` for any number of rows."""

    def load_compiled() -> Function:
        function = compiled(load, **options)()

        def call(rows: Tensor, *tensors: Tensor) -> Any:
            for tensor in (rows, *tensors):
                if len(tensor) == len(rows):
                    torch._dynamo.mark_dynamic(tensor, 0)
            return function(rows, *tensors)

        return call

    return load_compiled


def left(head: bool = False) -> str:
    """The losses that the pass should have replaced but did not; with ``head``, also the heads."""
    notes = []
    for call in inductor.last_report().calls:
        if not call.replaced:
            notes.append(f"left alone: {call.why}")
        elif head and not call.head:
            notes.append(f"head left alone: {call.head_left or 'not found'}")
    return "; ".join(notes)


def losses(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    upcast: Load = lambda: torch_loss_upcast  # noqa: E731
    own_options = partial(xent_ops.cross_entropy, **ALL_OPTIONS)
    with_pass: Load = lambda: compiled(upcast, options=inductor.options(linear=False))()  # noqa: E731  a new report
    known = contestants.losses()
    known += [
        Contestant("xent in-place", "ours", partial(in_place)),
        Contestant("xent one pass in-place", "ours", partial(in_place, grad_in_forward=True)),
        Contestant("xent one pass compiled", "ours", compiled(lambda: with_grad)),
        Contestant("xent compiled options", "ours", compiled(own_options), options=ALL_OPTIONS | {"weight": True}),
        Contestant(
            "F compiled options", "torch", compiled(lambda: torch_options), options=ALL_OPTIONS | {"weight": True}
        ),
        Contestant("F compiled with the pass", "ours", with_pass, confirm=left),
        *(
            replace(peer, name=f"{peer.name} compiled", load=compiled(peer.load))
            for peer in known
            if "quack" in peer.name
        ),
    ]
    if setting.dtype in (torch.bfloat16, torch.float16):
        known.append(Contestant("F eager float32", "torch", upcast))
    if setting.device.type == "cuda":
        known.append(Contestant("F max-autotune", "torch", compiled(upcast, mode="max-autotune-no-cudagraphs")))
    if arguments.dynamic:
        known.append(Contestant("xent compiled dynamic", "ours", any_rows(partial(xent_ops.cross_entropy))))
        known.append(Contestant("F compiled dynamic", "torch", any_rows(upcast)))
    return tables_of(Loss, arguments.shapes, (), known, setting)


def opaque_inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    from .opaque import opaque_backward

    with opaque_backward():
        return compile_fx(graph, inputs)


def step(loss: Callable[..., Tensor], **options: Any) -> Load:
    """A step that computes all logits. They are no input, so a gradient may be written over them."""
    return lambda: lambda hidden, matrix, target, *weight: loss(hidden @ matrix.T, target, *weight, **options)


def steps(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    """Compiled steps. The opaque backward is the baseline for a compiled gradient written over the logits."""
    ours, upcast = step(xent_ops.cross_entropy), step(torch_loss_upcast)
    known = [unit(THREE_MATMULS, lambda: products)]
    for compile_it, end in ((compiled, ""), (any_rows, " dynamic")):
        if end and not arguments.dynamic:
            continue
        known += [
            Contestant(f"xent compiled{end}", "ours", compile_it(ours)),
            Contestant(f"xent opaque backward{end}", "ours", compile_it(ours, backend=opaque_inductor)),
            Contestant(f"F compiled{end}", "torch", compile_it(upcast)),
        ]
    for name, options in {"xent in-place": {}, "xent one pass in-place": {"grad_in_forward": True}}.items():
        known.append(Contestant(name, "ours", step(xent_ops.cross_entropy, inplace_backward=True, **options)))
    return tables_of(Head, arguments.shapes, arguments.hidden, known, setting)


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
    "upcast": (torch_loss_upcast, {}),
    "nanochat": (lambda x, t: F.cross_entropy(15 * torch.tanh(x.float() / 15), t), {"softcap": 15.0}),
    "Gemma 2": (gemma, {"softcap": 30.0}),
    "Granite": (lambda x, t: F.cross_entropy((x / 16.0).float(), t), {"logit_scale": 1 / 16}),
    "Cohere": (lambda x, t: F.cross_entropy((x * 0.0625).float(), t), {"logit_scale": 0.0625}),
    "temperature, rows": (by_rows, {"logit_scale": 1 / 1.25}),
    "nll_loss": (lambda x, t: F.nll_loss(F.log_softmax(x.float(), -1), t), {}),
    # The operator has no shift: the pass leaves this alone.
    "shift": (lambda x, t: F.cross_entropy(x.float() + 1.0, t), {}),
}


def tails(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    """Three lines for each tail: compiled F.cross_entropy, the same with the pass, and our own call."""
    known = [unit(THREE_MATMULS, lambda: products)]
    for name, (loss, options) in TAILS.items():
        # The slack is for Inductor, which may write a tail's intermediate values to memory in bfloat16.
        by_torch = Contestant(f"{name}: F compiled", "torch", compiled(step(loss)), options=options, slack=4.0)
        with_pass = compiled(step(loss), options=inductor.options(linear=False))
        ours = compiled(step(xent_ops.cross_entropy, **options))
        known += [
            by_torch,
            replace(by_torch, name=f"{name}: pass", kind="ours", load=with_pass, confirm=left),
            Contestant(f"{name}: own call", "ours", ours, options=options),
        ]
    return tables_of(Head, arguments.shapes, arguments.hidden, known, setting)
