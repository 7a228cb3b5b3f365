"""Operators for the head and the loss together (linear cross entropy). They hold a chunk of logits."""

from . import chunk, composite, divergences, operators, shard  # noqa: F401 (they register them)
