"""The head and the loss as one: operators of linear cross entropy, which never hold all logits."""

from . import composite, operators, shard

__all__ = ["composite", "operators", "shard"]
