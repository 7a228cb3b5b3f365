"""The operators of the namespace ``xent``; importing this registers them."""

from . import composite, cross_entropy, linear, shard, soft_cross_entropy, with_grad

__all__ = ["composite", "cross_entropy", "linear", "shard", "soft_cross_entropy", "with_grad"]
