"""The one cache between an operator's call and its kernels: call signature -> prepared launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

Signature = tuple[Any, ...]


def call_signature(args: tuple[Any, ...], options: dict[str, Any]) -> Signature:
    """Everything that launches depend on: no numbers in tensors, and of an address only its offset modulo 16 bytes."""
    return (
        *[
            (arg.shape, arg.stride(), arg.dtype, arg.device, arg.data_ptr() % 16)
            if arg is not None and isinstance(arg, Tensor)
            else arg
            for arg in args
        ],
        *options.items(),
    )


class LaunchCache:
    """Launches by call signature. An entry was made after the arguments were checked and the kernels chosen.

    Checking, choosing and binding at every call would add 50 us to a step that takes the host 42 us (one core of an
    EPYC, launches that do nothing, 2026-11-22). The cache is bounded, because a number of rows may never occur again;
    the oldest entry is removed first.
    """

    SIZE = 1024

    def __init__(self) -> None:
        self._launches: dict[Signature, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self.get = self._launches.get

    def put(self, signature: Signature, launch: Callable[..., Any]) -> None:
        with self._lock:
            if len(self._launches) >= self.SIZE:
                del self._launches[next(iter(self._launches))]
            self._launches[signature] = launch

    def __len__(self) -> int:
        return len(self._launches)
