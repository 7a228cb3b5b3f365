"""Every launcher, by the name of its operator: allocate, take strides, pick a block, launch.

Each is called with the operator's arguments and returns its outputs. Arguments have passed the operators' checks and
none is float64. Nothing here reads a tensor's values or synchronises, so that every launch can be captured in an NPU
graph.
"""

from .launch_backward import (
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_with_grad,
    cross_entropy_with_grad_,
)
from .launch_forward import cross_entropy_forward, cross_entropy_reduced
from .launch_shard import cross_entropy_shard, cross_entropy_shard_join, cross_entropy_shard_reduced
from .launch_soft import soft_cross_entropy_backward, soft_cross_entropy_forward

__all__ = [
    "cross_entropy_backward",
    "cross_entropy_backward_",
    "cross_entropy_forward",
    "cross_entropy_reduced",
    "cross_entropy_shard",
    "cross_entropy_shard_join",
    "cross_entropy_shard_reduced",
    "cross_entropy_with_grad",
    "cross_entropy_with_grad_",
    "soft_cross_entropy_backward",
    "soft_cross_entropy_forward",
]
