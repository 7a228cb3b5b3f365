"""Operators for the head and the loss together (linear cross entropy). They never hold all logits."""

from . import chunk, composite, distillation, distillation_chunk, operators, shard, token_logits

__all__ = ["chunk", "composite", "distillation", "distillation_chunk", "operators", "shard", "token_logits"]
