"""What functions with more than one result return, and how they are made of the operators' values of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kernels.options import Options
from .kernels.reductions import Reduced
from .kernels.reference import is_counted


class CrossEntropyOutputs(NamedTuple):
    """What ``cross_entropy_outputs`` returns. Shapes are for targets (N, d1, ...).

    Attributes:
        loss: () or, for reduction="none", the target's shape; includes z_loss.
        z_loss: likewise; 0 where lse_square_scale is 0.
        lse: the target's shape, differentiable.
        predictions: the target's shape, int64; -1 in ignored rows.
        accuracy: (), the share of counted rows whose prediction is the target; NaN without one.
    """

    loss: Tensor
    z_loss: Tensor
    lse: Tensor
    predictions: Tensor
    accuracy: Tensor


class TokenLogProbs(NamedTuple):
    """What ``token_log_probs`` returns, each of the target's shape and differentiable.

    Attributes:
        log_probs: of the target; 0 in ignored rows.
        entropy: of the softmax, in nats; 0 in ignored rows.
        lse: the logsumexp of the row.
    """

    log_probs: Tensor
    entropy: Tensor
    lse: Tensor


def outputs_of_rows(
    reduced: Reduced, lse: Tensor, argmax: Tensor, target: Tensor, options: Options
) -> CrossEntropyOutputs:
    total, z_loss = reduced
    counted = is_counted(target, options.ignore_index)
    hits = counted & (argmax == target)
    return CrossEntropyOutputs(
        total,
        torch.zeros_like(total) if z_loss is None else z_loss,
        lse,
        torch.where(counted, argmax, -1),
        hits.sum() / counted.sum().to(lse.dtype),  # not in the default dtype, as integers are divided
    )


def log_probs_of_rows(loss: Tensor, lse: Tensor, entropy: Tensor, target: Tensor, options: Options) -> TokenLogProbs:
    counted = is_counted(target, options.ignore_index)
    return TokenLogProbs(-loss, torch.where(counted, entropy, 0.0), lse)
