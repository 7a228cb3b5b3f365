"""The operators of the namespace ``xent``; importing this registers them."""

from . import composite, cross_entropy, entropy, shard, soft_cross_entropy

__all__ = ["composite", "cross_entropy", "entropy", "shard", "soft_cross_entropy"]
