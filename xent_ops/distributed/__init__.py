"""Losses over a vocabulary that is split between ranks."""

from typing import Any

from ..ops.foreign_names import refuse_attribute
from .bound import Shard
from .vocab_parallel import vocab_parallel_cross_entropy

__all__ = ["Shard", "vocab_parallel_cross_entropy"]
_OLD = "vocab_parallel_"  # of names before 1.0, such as vocab_parallel_linear_top_k


def __getattr__(name: str) -> Any:
    if name.startswith(f"{_OLD}linear_"):  # not an AttributeError, whose text ``from`` leaves out
        raise ImportError(
            f"{name} is an argument now: write xent_ops.{name.removeprefix(_OLD)}(..., shard=xent_ops.distributed."
            "Shard(num_classes, group)), with linear_weight= and linear_bias= for this rank's part of the head"
        )
    refuse_attribute(__name__, name)
