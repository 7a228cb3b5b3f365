"""Operators for the head and the loss together (linear cross entropy). They never hold all logits."""

from . import chunk, composite, divergences, operators, shard, token_logits  # noqa: F401 (they register them)
