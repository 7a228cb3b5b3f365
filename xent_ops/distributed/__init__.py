"""Losses over a vocabulary that is split between ranks."""

from .distillation import vocab_parallel_linear_distillation_loss
from .distillation_token_loss import vocab_parallel_linear_distillation_token_loss
from .linear import vocab_parallel_linear_cross_entropy, vocab_parallel_linear_token_log_probs
from .token_loss import vocab_parallel_linear_token_loss
from .top_k import vocab_parallel_linear_top_k
from .top_k_distillation import vocab_parallel_linear_top_k_distillation_loss
from .vocab_parallel import vocab_parallel_cross_entropy

__all__ = [
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_distillation_loss",
    "vocab_parallel_linear_distillation_token_loss",
    "vocab_parallel_linear_token_log_probs",
    "vocab_parallel_linear_token_loss",
    "vocab_parallel_linear_top_k",
    "vocab_parallel_linear_top_k_distillation_loss",
]
