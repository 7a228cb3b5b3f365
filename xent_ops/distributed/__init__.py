"""Losses over a vocabulary that is split between ranks."""

from typing import Any

from ..ops.foreign_names import refuse_attribute, refuse_function_of_ranks
from .bound import Shard
from .vocab_parallel import vocab_parallel_cross_entropy

__all__ = ["Shard", "vocab_parallel_cross_entropy"]


def __getattr__(name: str) -> Any:
    refuse_function_of_ranks(name)
    refuse_attribute(__name__, name)
