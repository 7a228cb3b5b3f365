"""The calls of models of transformers that run now, by thread, and the classes of their outputs."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any

import torch
from torch import Tensor


class Call:
    """A call of the model, and what the hooks have seen of it."""

    def __init__(self, has_labels: bool) -> None:
        self.has_labels, self.has_grad = has_labels, torch.is_grad_enabled()
        self.hidden: Tensor | None = None  # the head's input
        self.has_loss = False  # was the loss of its logits computed?
        self.predicted: dict[str, Tensor] = {}


class Key:
    """Of a model's hooks. An object of its own class: Dynamo compares no other objects."""


class _Running(threading.local):
    """The calls that run in this thread, by the keys of their models' hooks.

    A global: of a tensor that Dynamo finds through a hook of an nn.Linear, it takes the shape as a constant, and each
    length would be another graph. A number in a global is a constant to it too, so a call holds tensors.
    """

    def __init__(self) -> None:
        self.calls: dict[Key, Call] = {}


RUNNING = _Running()


def key_of(hooks: Any) -> Key:
    """A new key. A call of this thread that Ctrl-C interrupts ends with these hooks at the latest: it runs no hook."""
    key = Key()
    weakref.finalize(hooks, RUNNING.calls.pop, key, None)
    return key


_WITH_PREDICTIONS: dict[type, Any] = {}


@torch.compiler.assume_constant_result  # Dynamo cannot trace how a class is made
def with_predictions(kind: type) -> Any:
    """A model's class of outputs with two more fields. Pytree makes an output from the fields of its class."""
    if kind not in _WITH_PREDICTIONS:
        fields = [(name, Tensor | None, None) for name in ("predictions", "accuracy")]
        names = {"__module__": __name__, "__reduce__": lambda output: (_unpickled, (kind, dict(output)))}
        name = f"{kind.__name__}WithPredictions"
        _WITH_PREDICTIONS[kind] = dataclasses.make_dataclass(name, fields, bases=(kind,), namespace=names)
    return _WITH_PREDICTIONS[kind]


def _unpickled(kind: type, fields: dict[str, Any]) -> Any:
    return with_predictions(kind)(**fields)
