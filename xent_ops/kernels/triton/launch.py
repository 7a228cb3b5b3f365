"""Every launcher, by the name of its operator: from tensors to kernels.

A launcher takes strides, picks a config, allocates and launches, in two stages; ``@launcher`` (common.py) puts it into
``LAUNCHERS``. Arguments have passed the operators' checks. Nothing here synchronises, so that every launch can be
captured in a CUDA graph. Launchers allocate outputs and a few numbers for each row or class. If the rows need more than
two strides, they also copy the logits.
"""

from . import (  # noqa: F401
    launch_backward,
    launch_divergences,
    launch_forward,
    launch_ids,
    launch_reduce,
    launch_shard,
    launch_soft,
    launch_top_k,
    launch_with_grad,
)
from .common import LAUNCHERS

__all__ = ["LAUNCHERS"]
