"""``--linear HIDDEN --token-loss LOSS``: losses of tokens from hidden states, beside the three products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops

from . import check, few_classes
from .cases import Peer, imported, of_peers
from .linear_cases import LinearVariant
from .linear_problem import LinearProblem
from .sizes import HeadShape

Stats = xent_ops.TokenLogProbs


def clip(stats: Stats, old: Tensor, factor: Tensor) -> Tensor:
    """GRPO without a bonus, as Liger-Kernel has it; the factors are advantages."""
    ratio = (stats.log_probs - old).exp()
    return -torch.minimum(ratio * factor, ratio.clamp(0.8, 1.2) * factor)


def grpo(stats: Stats, old: Tensor, factor: Tensor) -> Tensor:
    """With an entropy bonus."""
    return clip(stats, old, factor) - 0.01 * stats.entropy


def weights(stats: Stats, old: Tensor, factor: Tensor) -> Tensor:
    """Cross entropy with a weight for each token."""
    return -factor * stats.log_probs


LOSSES = {"grpo": grpo, "clip": clip, "weights": weights}
SEQUENCE = 1024  # tokens that share an advantage, where so many divide the rows; else all do

# What follows takes (hidden, matrix, target, old, factor): old log-probabilities and factors of tokens. A loss is the
# sum over counted tokens by their number.


def _number(target: Tensor) -> Tensor:
    return (target != check.IGNORE_INDEX).sum()


def _by_function(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, old: Tensor, factor: Tensor) -> Tensor:
    return xent_ops.linear_token_loss(
        hidden, matrix, target, fn, rows=(old, factor), reduction="sum", divisor=_number(target)
    )


def _by_weights(hidden: Tensor, matrix: Tensor, target: Tensor, old: Tensor, factor: Tensor) -> Tensor:
    divisor = _number(target)
    return xent_ops.linear_cross_entropy(hidden, matrix, target, token_weight=factor, reduction="sum", divisor=divisor)


def _of_statistics(fn: Any, statistics: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *rows: Tensor) -> Tensor:
    value = fn(statistics(hidden, matrix, target), *rows)
    return torch.where(target != check.IGNORE_INDEX, value, 0.0).sum() / _number(target)


def _in_torch(hidden: Tensor, matrix: Tensor, target: Tensor) -> Stats:
    logits = F.linear(hidden, matrix).float()
    lse = logits.logsumexp(-1)
    log_probs = logits - lse.unsqueeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    index = target.clamp(min=0).unsqueeze(-1)
    return Stats(log_probs.gather(-1, index).squeeze(-1), entropy, lse)


def _load_liger() -> Any:
    """Its GRPO of sequences, with the mean over tokens ("bnpo"): it takes (sequences, tokens, H)."""
    kind = imported("liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss")
    grpo = kind(beta=0.0, loss_type="bnpo", use_ref_model=False)

    def loss(hidden: Tensor, matrix: Tensor, target: Tensor, old: Tensor, factor: Tensor) -> Tensor:
        length = _sequence(target.numel())
        target, old, factor = (values.view(-1, length) for values in (target, old, factor))
        mask = (target != check.IGNORE_INDEX).float()
        rows = hidden.view(*target.shape, -1)
        value: Tensor = grpo(rows, matrix, target.clamp(min=0), mask, factor[:, 0], old_per_token_logps=old)[0]
        return value

    return loss


def _sequence(rows: int) -> int:
    return SEQUENCE if rows % SEQUENCE == 0 else rows


PEERS = (Peer(("liger-kernel", "liger-kernel-nightly"), "liger_kernel", _load_liger),)


def variants(loss: str) -> tuple[list[LinearVariant], list[str]]:
    """(the contestants, what is left out and why)."""
    if loss == few_classes.NAME:
        return few_classes.variants(), []
    fn = LOSSES[loss]
    function = functools.partial(functools.partial, _by_function, fn)
    log_probs = functools.partial(functools.partial, _of_statistics, fn, xent_ops.linear_token_log_probs)
    in_torch = functools.partial(functools.partial, _of_statistics, fn, _in_torch)
    ways: list[tuple[str, str, Callable[[], Any]]] = [("xent token loss", "ours", function)]
    if loss == "weights":
        ways.insert(0, ("xent token_weight", "ours", lambda: _by_weights))
    found = [
        LinearVariant(f"{name} {how}", kind, load, compiled=how == "compiled")
        for name, kind, load in ways
        for how in ("eager", "compiled")
    ]
    peers, absent = of_peers(LinearVariant, PEERS if loss == "clip" else ())
    return [
        *found,
        LinearVariant("xent log-probs compiled", "ours", log_probs, compiled=True),
        LinearVariant("torch compiled", "torch", in_torch, compiled=True),
        *peers,
    ], absent


class _Reference(check.Reference):
    """float64 values of a function of tokens, and gradients of their logits."""

    def __init__(self, target: Tensor, weight: Tensor, fn: Any, rows: tuple[Tensor, ...]) -> None:
        super().__init__(target, weight, check.Options())
        self.fn, self.of_tokens = fn, rows

    def rows(self, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        z = logits.detach().double().requires_grad_()
        log_probs, lse = z.log_softmax(-1), z.logsumexp(-1)
        index = torch.where(self.counted[part], self.target[part], 0).unsqueeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        stats = Stats(log_probs.gather(-1, index).squeeze(-1), entropy, lse)
        value = self.fn(stats, *(row[part].double() for row in self.of_tokens))
        total = torch.where(self.counted[part], value, 0.0).sum() / self.number
        (grad,) = torch.autograd.grad(total, z)
        return total.detach(), grad


class TokenProblem(LinearProblem):
    """Ratios of new to old probabilities are between .9 and 1.1: none is at a bound, where rounding would decide."""

    # The relative error of a ratio is the absolute one of a logit. The loss is about one, where cross entropy is eight.
    slack, loss_slack = 2.0, 8.0

    def __init__(
        self, loss: str, shape: HeadShape, dtype: torch.dtype, device: torch.device, *, ignored: float | None = None
    ) -> None:
        super().__init__(shape, dtype, device, ignored=ignored)
        self.fn = LOSSES[loss]
        self.factor = torch.rand(shape.rows, generator=self.generator, device=device) + 0.5
        if loss == "clip":  # of a sequence each
            length = _sequence(shape.rows)
            self.factor = self.factor.view(-1, length)[:, :1].expand(-1, length).flatten()
        noise = torch.rand(shape.rows, generator=self.generator, device=device) * 0.18 - 0.09
        self.olds = [self._log_probs(target) + noise for target in self.targets]
        self.old = self.olds[0].clone()

    def _log_probs(self, target: Tensor) -> Tensor:
        found, matrix = [], self.matrix.detach().double()
        for part in check.chunks(*self.shape, self.chunk):
            log_probs = (self.hidden.detach()[part].double() @ matrix.T).log_softmax(-1)
            found.append(log_probs.gather(-1, target[part].clamp(min=0).unsqueeze(-1)).squeeze(-1))
        return torch.cat(found).float()

    def use_targets(self, which: int) -> None:
        super().use_targets(which)
        self.old.copy_(self.olds[which])

    def of_tokens(self) -> tuple[Tensor, ...]:
        return self.old, self.factor

    def float64(self, options: check.Options) -> check.Reference:
        return _Reference(self.target, self.weight, self.fn, self.of_tokens())


def problem(loss: str, *given: Any, ignored: float | None = None) -> LinearProblem:
    if loss == few_classes.NAME:
        return few_classes.FewClassesProblem(*given, ignored=ignored)
    return TokenProblem(loss, *given, ignored=ignored)
