"""The operators of the namespace ``xent``. Importing this package registers them."""

from . import (  # noqa: F401 (they register them)
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
)

flops.install()
