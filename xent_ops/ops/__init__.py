"""The operators of the namespace ``xent``; importing this registers them."""

from . import composite, cross_entropy, linear, one_pass, shard, soft_cross_entropy

__all__ = ["composite", "cross_entropy", "linear", "one_pass", "shard", "soft_cross_entropy"]
