"""The results of functions that return more than one value, and their computation from operators' values of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .kernels.options import DEFAULTS, LossOptions
from .kernels.reference import is_counted
from .ops.foreign_names import refuse_field
from .ops.reduction import summary


class CrossEntropyOutputs(NamedTuple):
    """The result of ``cross_entropy_outputs``. Shapes are for targets (N, d1, ...). Fields that are not marked
    differentiable are constants.

    Attributes:
        loss: () or, for reduction="none", the target's shape; includes z_loss. Differentiable.
        z_loss: shape as for the loss; 0 if lse_square_scale is 0. Differentiable for reduction="none".
        lse: the target's shape, infinite in ignored rows. Differentiable.
        predictions: the target's shape, int64; the first index of the largest ``logit_scale * logit``, -1 in ignored
            rows.
        accuracy: (), the share of counted rows whose prediction is the target; NaN if no row is counted.
        token_losses: the target's shape; each row's loss without z-loss and token_weight, 0 in ignored rows. Without
            label smoothing and class weights it is -log p of the target.
        entropy: the target's shape, of the softmax, in nats; 0 in ignored rows.
    """

    loss: Tensor
    z_loss: Tensor
    lse: Tensor
    predictions: Tensor
    accuracy: Tensor
    token_losses: Tensor
    entropy: Tensor


class TokenLogProbs(NamedTuple):
    """The result of ``token_log_probs``. All fields are of the target's shape and differentiable.

    Attributes:
        log_probs: of the target; 0 in ignored rows. With ids (..., K) there is one per id; 0 for ignored ids.
        entropy: of the softmax, in nats; 0 in ignored rows.
        lse: the logsumexp of the row.
    """

    log_probs: Tensor
    entropy: Tensor
    lse: Tensor


class TokenDivergences(NamedTuple):
    """What a function of ``linear_distillation_token_loss`` gets: numbers of n tokens, each (n,), float32 (float64 for
    float64 input). s and t are the probabilities of the student and of the teacher at the temperature, over the same
    classes. The first five are differentiable in the student, the others are constants. All are 0 in ignored rows:
    average over ``target != ignore_index``.

    Attributes:
        kl: KL(t || s).
        reverse_kl: KL(s || t).
        jsd: beta KL(t || m) + (1 - beta) KL(s || m), with m = (1 - beta) s + beta t.
        overlap: the sum over the classes of min(s, t), which is 1 - the total variation: the acceptance rate of a draft
            model. With ``classes``, t is the teacher's probability among all of its classes here. Rounding may make it
            larger than 1 by 2e-7. Its gradient is discontinuous where s = t.
        log_prob: the log-probability of the target, at a temperature of one.
        coverage: the teacher's probability of all of the student's classes together; 1 without ``classes``.
        agrees: 1 where both have the same most probable class, among all of their classes, else 0.
        covers_top: 1 where the teacher's most probable class is one of the student's, else 0.
    """

    kl: Tensor
    reverse_kl: Tensor
    jsd: Tensor
    overlap: Tensor
    log_prob: Tensor
    coverage: Tensor
    agrees: Tensor
    covers_top: Tensor


class TopK(NamedTuple):
    """The result of ``top_k``, of targets (...). All fields but ids and target_ranks are differentiable.

    Attributes:
        log_probs: (..., k), of the k most probable classes, the largest logit first; 0 in ignored rows.
        ids: (..., k), int64: these classes; -100 in ignored rows, so that losses with the default ignore_index ignore
            them as targets (..., K). ignore_index itself may be one of the classes.
        lse, entropy: (...), of all classes; infinite and 0 in ignored rows.
        target_log_probs: (...), 0 in ignored rows. None without a target.
        target_ranks: (...), int64, the number of classes before the target: 0 for the largest, -1 in ignored rows.
            ``ids[rank]`` is the target where the rank is below k. None without a target.
    """

    log_probs: Tensor
    ids: Tensor
    lse: Tensor
    entropy: Tensor
    target_log_probs: Tensor | None
    target_ranks: Tensor | None


def _no_field(self: Any, name: str) -> NoReturn:
    refuse_field(type(self).__name__, name, self._fields)


for _record in (CrossEntropyOutputs, TokenLogProbs, TokenDivergences, TopK):
    setattr(_record, "__getattr__", _no_field)  # noqa: B010 (in the class, type checkers would accept any name)


def outputs_of_rows(
    rows: Sequence[Tensor],
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    loss: LossOptions,
    token_weight: Tensor | None,
) -> CrossEntropyOutputs:
    """From the rows' (loss, lse, argmax, entropy)."""
    row_loss, lse, argmax, entropy = rows
    value, z_loss, accuracy = summary(row_loss, lse, target, weight, token_weight, divisor, loss, argmax)
    assert z_loss is not None and accuracy is not None
    counted = is_counted(target, loss.row_options.ignore_index)
    return CrossEntropyOutputs(
        value,
        z_loss if loss.reduction == "none" else z_loss.detach(),
        torch.where(counted, lse, float("inf")),
        torch.where(counted, argmax, -1),
        accuracy,
        row_loss.detach(),
        entropy.detach(),
    )


def log_probs_of_ids(at_ids: Tensor, lse: Tensor, low: Tensor, ids: Tensor, ignore_index: int) -> Tensor:
    """(..., K), from x of the ids; 0 for ignored ids."""
    log_probs = (at_ids - lse.unsqueeze(-1)) - low.unsqueeze(-1)
    return torch.where(is_counted(ids, ignore_index), log_probs, 0.0)


def log_probs_of_rows(
    loss_or_at_ids: Tensor, lse: Tensor, entropy: Tensor, low: Tensor, ids: Tensor | None, ignore_index: int
) -> TokenLogProbs:
    """``loss_or_at_ids``: losses, or with several classes per row (ids) x of each."""
    log_probs = -loss_or_at_ids if ids is None else log_probs_of_ids(loss_or_at_ids, lse, low, ids, ignore_index)
    return TokenLogProbs(log_probs, entropy, lse)


def top_k_of_rows(values: Sequence[Tensor], target: Tensor | None, k: int, ignore_index: int) -> TopK:
    """From x of the ids, the ids, lse, entropy, rank and lse_low. The target is the last of the ids."""
    at_ids, ids, lse, entropy, rank, low = values
    if target is None:
        return TopK((at_ids - lse.unsqueeze(-1)) - low.unsqueeze(-1), ids, lse, entropy, None, None)
    log_probs = log_probs_of_ids(at_ids, lse, low, ids, DEFAULTS.ignore_index)
    counted = is_counted(target, ignore_index)
    lse = torch.where(counted, lse, float("inf"))
    return TopK(log_probs[..., :k], ids[..., :k], lse, entropy, log_probs[..., k], rank)
