"""The losses of a head that is split over ranks. They take the fields of ``Shard`` beside their own arguments.

``check`` is the shard's, and ``check_fn`` that of a token loss.
"""

import functools
import inspect

import xent_ops
from xent_ops.distributed import Shard


def _with_fields(function):
    own = inspect.signature(function).parameters
    fields = inspect.signature(Shard).parameters

    @functools.wraps(function)
    def call(*args, check_fn=None, **options):
        shard = Shard(**{name: options.pop(name) for name in fields if name in options})
        if check_fn is not None:
            options["check"] = check_fn
        return function(*args, **options, shard=shard)

    names = [name for name in own if name != "shard" and name not in fields] + [*fields]
    call.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
    return call


linear_cross_entropy = _with_fields(xent_ops.linear_cross_entropy)
linear_distillation_loss = _with_fields(xent_ops.linear_distillation_loss)
linear_distillation_token_loss = _with_fields(xent_ops.linear_distillation_token_loss)
linear_token_divergences = _with_fields(xent_ops.linear_token_divergences)
linear_token_log_probs = _with_fields(xent_ops.linear_token_log_probs)
linear_token_loss = _with_fields(xent_ops.linear_token_loss)
linear_top_k = _with_fields(xent_ops.linear_top_k)
linear_top_k_distillation_loss = _with_fields(xent_ops.linear_top_k_distillation_loss)
