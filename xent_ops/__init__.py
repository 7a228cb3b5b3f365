"""Cross entropy as a family of registered operators that torch.compile can see. Start at ``cross_entropy``."""

import importlib
from typing import TYPE_CHECKING, Any

from . import _command_line  # noqa: F401 (must be first: `python -m xent_ops --help` exits there, without torch)

# isort: split
from . import inductor
from . import ops as _ops  # noqa: F401 (registers the operators)
from ._extension import library_path
from ._version import __version__
from .distillation import distillation_loss, linear_distillation_loss
from .divergence_loss import distillation_token_loss, linear_distillation_token_loss
from .export import decompositions
from .functional import check_targets, cross_entropy, cross_entropy_outputs, token_log_probs
from .kernels.options import Reduction
from .linear import linear_cross_entropy, linear_cross_entropy_outputs, linear_token_log_probs
from .modules import CrossEntropyLoss, LinearCrossEntropyLoss
from .ops import foreign_names as _foreign_names
from .outputs import CrossEntropyOutputs, TokenDivergences, TokenLogProbs, TopK
from .token_divergences import linear_token_divergences, token_divergences
from .token_loss import linear_token_loss, token_loss
from .top_k import linear_top_k, top_k
from .top_k_distillation import linear_top_k_distillation_loss, top_k_distillation_loss
from .use import remove_xent, use_xent

if TYPE_CHECKING:
    from . import distributed

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyOutputs",
    "LinearCrossEntropyLoss",
    "Reduction",
    "TokenDivergences",
    "TokenLogProbs",
    "TopK",
    "__version__",
    "check_targets",
    "cross_entropy",
    "cross_entropy_outputs",
    "decompositions",
    "distillation_loss",
    "distillation_token_loss",
    "distributed",
    "inductor",
    "library_path",
    "linear_cross_entropy",
    "linear_cross_entropy_outputs",
    "linear_distillation_loss",
    "linear_distillation_token_loss",
    "linear_token_divergences",
    "linear_token_log_probs",
    "linear_token_loss",
    "linear_top_k",
    "linear_top_k_distillation_loss",
    "remove_xent",
    "token_divergences",
    "token_log_probs",
    "token_loss",
    "top_k",
    "top_k_distillation_loss",
    "use_xent",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # torch.distributed and DTensor are most of a second of import time, so they are imported on first use.
    if name == "distributed":
        return importlib.import_module(".distributed", __name__)
    _foreign_names.refuse_attribute(__name__, name)
