"""The operators of the namespace ``xent``. Importing this package registers them."""

from . import (
    composite,
    cross_entropy,
    divergences,
    flops,
    linear,
    reduction,
    shard,
    soft_cross_entropy,
    token_logits,
    top_k,
    top_k_distillation,
    with_grad,
)

__all__ = [
    "composite",
    "cross_entropy",
    "divergences",
    "flops",
    "linear",
    "reduction",
    "shard",
    "soft_cross_entropy",
    "token_logits",
    "top_k",
    "top_k_distillation",
    "with_grad",
]

flops.install()
