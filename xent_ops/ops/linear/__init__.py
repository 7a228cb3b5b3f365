"""The head and the loss as one: operators of linear cross entropy, which never hold all logits."""

from . import composite, operators, pipeline, shard

__all__ = ["composite", "operators", "pipeline", "shard"]
