"""Every launcher, by the name of its operator: from tensors to kernels.

A launcher takes strides, picks a config, allocates and launches, in two stages (``launcher``, common.py). Arguments
have passed the operators' checks. Nothing here synchronises, so that every launch can be captured in a CUDA graph. What
is allocated is an output, a few numbers a row or class, or, where no two strides describe the rows, a copy of the
logits.
"""

from .launch_backward import cross_entropy_backward, cross_entropy_backward_
from .launch_forward import cross_entropy_forward
from .launch_one_pass import cross_entropy_with_grad, cross_entropy_with_grad_, scale_grad_
from .launch_reduce import cross_entropy_divisor, cross_entropy_reduced
from .launch_shard import cross_entropy_shard, cross_entropy_shard_join, cross_entropy_shard_reduced
from .launch_soft import soft_cross_entropy_backward, soft_cross_entropy_forward

__all__ = [
    "cross_entropy_backward",
    "cross_entropy_backward_",
    "cross_entropy_divisor",
    "cross_entropy_forward",
    "cross_entropy_reduced",
    "cross_entropy_shard",
    "cross_entropy_shard_join",
    "cross_entropy_shard_reduced",
    "cross_entropy_with_grad",
    "cross_entropy_with_grad_",
    "scale_grad_",
    "soft_cross_entropy_backward",
    "soft_cross_entropy_forward",
]
