"""Cross entropy as a family of registered operators that torch.compile can see. Start at ``cross_entropy``."""

from . import distributed, inductor
from . import ops as _ops  # noqa: F401 (registers the operators)
from ._version import __version__
from .functional import (
    CrossEntropyOutputs,
    TokenLogProbs,
    cross_entropy,
    cross_entropy_outputs,
    token_log_probs,
)
from .modules import CrossEntropyLoss
from .ops.checks import check_targets

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyOutputs",
    "TokenLogProbs",
    "__version__",
    "check_targets",
    "cross_entropy",
    "cross_entropy_outputs",
    "distributed",
    "inductor",
    "token_log_probs",
]
