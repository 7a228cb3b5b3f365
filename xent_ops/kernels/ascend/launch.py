"""Every launcher, by the name of its operator: allocate, take strides, pick a block, launch.

Each is called with the operator's arguments and returns its outputs; ``@launcher`` (common.py) puts it into
``LAUNCHERS``. Arguments have passed the operators' checks and none is float64. Nothing here reads a tensor's values or
synchronises, so that every launch can be captured in an NPU graph.
"""

from . import launch_backward, launch_forward, launch_shard, launch_soft  # noqa: F401
from .common import LAUNCHERS

__all__ = ["LAUNCHERS"]
