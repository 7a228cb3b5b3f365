"""Tries a model of transformers on four tokens: what it does with its logits before its loss."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.options import Activation
from . import heads
from .unread import Unread, UnreadLogits


class Found(NamedTuple):
    """What a call with four tokens showed."""

    logits: Unread | None = None  # as the loss was given them
    output: type | None = None  # the class of the model's output
    untried: str | None = None  # why there are no logits


def find(model: Any, head: Any, upcast: bool = False, wrapper: Any = None) -> Found:
    """Run a forward of four tokens in evaluation mode with unread logits. ``upcast`` is as for ``heads.product``.

    ``wrapper`` is called in place of the model. Raises TypeError for a head that is not supported, and ValueError for a
    model that reads its logits, but nothing for one that wants other inputs or labels.
    """
    name = type(model).__name__
    if head.weight.is_meta:
        raise ValueError(f"{name} is on the meta device, where weights have no values: load them before use_xent")
    trial = _Trial(name, upcast)
    ids = torch.arange(4, device=head.weight.device)[None]
    accepted = inspect.signature(model.forward).parameters
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    options = {"use_cache": False} if "use_cache" in accepted or has_kwargs else {}
    options |= {"return_dict": True} if "return_dict" in accepted else {}
    training = {module: module.training for module in model.modules()}
    handle = head.register_forward_hook(trial.after_head, prepend=True)
    model.eval()
    try:
        with torch.no_grad(), heads.gathered(model):
            output = (model if wrapper is None else wrapper)(input_ids=ids, labels=ids.clone(), **options)
    except Exception as error:
        if trial.error is not None:
            raise trial.error from error
        return Found(untried=f"{type(error).__name__}: {error}".split("\n")[0])
    finally:
        handle.remove()
        for module, mode in training.items():
            module.training = mode
    if trial.calls == 0 and hasattr(model, "criterion"):  # models of flash-linear-attention
        raise ValueError(
            f"{name} computes its loss by model.criterion: instead of use_xent, put a criterion there that calls "
            "xent_ops.linear_cross_entropy (docs/migrate.md, flash-linear-attention)"
        )
    if trial.calls != 1:
        raise ValueError(f"{name} calls its head {trial.calls} times; expected once")
    return Found(trial.logits, type(output), None if trial.logits else "it computes no loss from four tokens")


def of_logits(model: Any, head: nn.Module) -> Activation:
    """The softcap and the scale of a model's logits. Raises ValueError where that is not all, or cannot be tried."""
    found = find(model, head)
    if found.logits is None or found.logits.bias is not None:
        reason = found.untried or "it adds a bias to its logits"
        raise ValueError(f"{type(model).__name__}: softcap and scale of its logits are not known: {reason}")
    return found.logits.tail()


def with_temperature(tail: Activation, temperature: float) -> Activation:
    """The tail, then a division by the temperature: cap tanh(s z / cap) / T."""
    cap, scale = tail
    return Activation(None if cap is None else cap / temperature, scale / temperature)


class _Trial:
    """The owner of the unread logits of one call."""

    def __init__(self, name: str, upcast: bool) -> None:
        self.name, self.upcast, self.calls = name, upcast, 0
        self.error: Exception | None = None  # what use_xent raises, where the model's call ended in an error of ours
        self.logits: Unread | None = None

    def after_head(self, head: nn.Module, args: tuple[Any, ...], output: Tensor) -> UnreadLogits:
        self.calls += 1
        try:
            heads.product(head, args[0], self.upcast)
        except TypeError as error:
            self.error = error
            raise
        return UnreadLogits(Unread(self, args[0], output.shape[-1], output.dtype))

    def cross_entropy(self, logits: UnreadLogits, target: Tensor, reduction: str = "mean", **_: Any) -> Tensor:
        self.logits = logits.unread
        return torch.zeros(target.shape if reduction == "none" else (), device=target.device)

    def refusal(self, use: str) -> Exception:
        self.error = ValueError(f"{self.name} reads its logits beside the loss: {use}. So they cannot be left out")
        return RuntimeError(str(self.error))
