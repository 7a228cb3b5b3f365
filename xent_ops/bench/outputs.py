"""What a step of the bench returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Outputs(NamedTuple):
    loss: Tensor  # ()
    grads: tuple[Tensor, ...]


Run = Callable[[], Outputs]
