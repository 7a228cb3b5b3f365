"""Cross entropy over a vocabulary that is split between ranks."""

from .vocab_parallel import vocab_parallel_cross_entropy

__all__ = ["vocab_parallel_cross_entropy"]
