"""Caches by call signature: an operator's prepared launches, and the calls whose arguments were checked."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

Signature = tuple[Any, ...]


def call_signature(args: tuple[Any, ...], options: dict[str, Any]) -> Signature:
    """What launches and checks depend on: no numbers in tensors, and of an address only its offset modulo 16 bytes."""
    return (
        *[
            (arg.shape, arg.stride(), arg.dtype, arg.device, arg.data_ptr() % 16)
            if isinstance(arg, Tensor)
            else tuple(arg)
            if type(arg) is list  # a mask
            else arg
            for arg in args
        ],
        *options.items(),
    )


class SignatureCache:
    """Values by call signature. An entry was made after the arguments were checked and, for launches, kernels chosen.

    Checking, choosing and binding at every call would add 50 us to a step that takes the host 42 us (one core of an
    EPYC, launches that do nothing, 2026-11-22). The cache is bounded, because a number of rows may never occur again;
    the oldest entry is removed first.
    """

    SIZE = 1024

    def __init__(self) -> None:
        self._values: dict[Signature, Any] = {}
        self._lock = threading.Lock()
        self.get = self._values.get

    def put(self, signature: Signature, value: Any) -> None:
        with self._lock:
            if len(self._values) >= self.SIZE:
                del self._values[next(iter(self._values))]
            self._values[signature] = value

    def clear(self) -> None:
        with self._lock:
            self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
