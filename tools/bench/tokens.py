"""Losses of tokens from hidden states, a teacher's most probable classes, and a teacher's whole distribution."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops
from xent_ops.bench import check
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import (
    LIGER,
    THREE_MATMULS,
    Contestant,
    Function,
    Outputs,
    Peer,
    compiled,
    imported,
    installed,
    products,
)
from xent_ops.bench.problems import Head
from xent_ops.bench.run import Setting, Table, head_tables

Stats = xent_ops.TokenLogProbs
Found = tuple[list[Table], Sequence[Peer]]


def clip(stats: Stats, old: Tensor, factor: Tensor) -> Tensor:
    """GRPO without a bonus, as in Liger-Kernel. The factors are advantages."""
    ratio = (stats.log_probs - old).exp()
    return -torch.minimum(ratio * factor, ratio.clamp(0.8, 1.2) * factor)


def grpo(stats: Stats, old: Tensor, factor: Tensor) -> Tensor:
    """GRPO with an entropy bonus."""
    return clip(stats, old, factor) - 0.01 * stats.entropy


def weights(stats: Stats, old: Tensor, factor: Tensor) -> Tensor:
    """Cross entropy with a weight for each token."""
    return -factor * stats.log_probs


LOSSES = {"grpo": grpo, "clip": clip, "weights": weights}
SEQUENCE = 1024  # tokens that share an advantage, if it divides the number of rows; otherwise all tokens do


def sequence(rows: int) -> int:
    return SEQUENCE if rows % SEQUENCE == 0 else rows


def number(target: Tensor) -> Tensor:
    return (target != check.IGNORE_INDEX).sum()


def mean(rows: Tensor, target: Tensor) -> Tensor:
    return torch.where(target != check.IGNORE_INDEX, rows, 0.0).sum() / number(target)


def stats_of(logits: Tensor, target: Tensor) -> Stats:
    lse = logits.logsumexp(-1)
    log_probs = logits - lse.unsqueeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return Stats(log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1), entropy, lse)


# The next functions take (hidden, matrix, target, old, factor): old log-probabilities and factors of tokens.


def by_function(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *rows: Tensor) -> Tensor:
    return xent_ops.linear_token_loss(hidden, matrix, target, fn, rows=rows)


def by_weights(hidden: Tensor, matrix: Tensor, target: Tensor, old: Tensor, factor: Tensor) -> Tensor:
    return xent_ops.linear_cross_entropy(
        hidden, matrix, target, token_weight=factor, reduction="sum", divisor=number(target)
    )


def by_log_probs(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *rows: Tensor) -> Tensor:
    return mean(fn(xent_ops.linear_token_log_probs(hidden, matrix, target), *rows), target)


def in_torch(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *rows: Tensor) -> Tensor:
    return mean(fn(stats_of(F.linear(hidden, matrix).float(), target), *rows), target)


def liger_grpo() -> Function:
    """Liger-Kernel's GRPO of sequences, with the mean over tokens ("bnpo"). Its input is (sequences, tokens, H)."""
    kind = imported("liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss")
    loss = kind(beta=0.0, loss_type="bnpo", use_ref_model=False)

    def call(hidden: Tensor, matrix: Tensor, target: Tensor, old: Tensor, factor: Tensor) -> Any:
        target, old, factor = (values.view(-1, sequence(target.numel())) for values in (target, old, factor))
        mask = (target != check.IGNORE_INDEX).float()
        rows = hidden.view(*target.shape, -1)
        return loss(rows, matrix, target.clamp(min=0), mask, factor[:, 0], old_per_token_logps=old)[0]

    return call


class Tokens(Head):
    """Ratios of new to old probabilities are between .9 and 1.1. At a bound rounding would decide, so none is there."""

    # The relative error of a ratio is the absolute error of a logit. The loss is about one, and cross entropy eight.
    slack, loss_slack = 2.0, 8.0

    def __init__(self, loss: str, shape: Shape, dtype: torch.dtype, device: torch.device, *given: Any) -> None:
        super().__init__(shape, dtype, device, *given)
        self.fn = LOSSES[loss]
        self.factor = torch.rand(shape.rows, generator=self.generator, device=device) + 0.5
        if loss == "clip":  # one factor for each sequence
            length = sequence(shape.rows)
            self.factor = self.factor.view(-1, length)[:, :1].expand(-1, length).flatten()
        noise = torch.rand(shape.rows, generator=self.generator, device=device) * 0.18 - 0.09
        self.olds = [self._log_probs(target) + noise for target in self.targets]
        self.old = self.olds[0].clone()

    def _log_probs(self, target: Tensor) -> Tensor:
        matrix = self.matrix.double()
        parts = check.chunks(*self.shape, self.logits_at_once())
        found = [stats_of(self.hidden[part].double() @ matrix.T, target[part]).log_probs for part in parts]
        return torch.cat(found).float()

    def use_targets(self, which: int) -> None:
        super().use_targets(which)
        self.old.copy_(self.olds[which])

    def row_tensors(self) -> tuple[Tensor, ...]:
        return self.old, self.factor

    def share(self, options: check.Options) -> check.Share:
        rows = self.row_tensors()

        def of_logits(logits: Tensor, part: slice) -> Tensor:
            value: Tensor = self.fn(stats_of(logits, self.target[part]), *(row[part].double() for row in rows))
            return value

        return check.mean(of_logits, self.target)


def both(name: str, load: Callable[[], Function]) -> list[Contestant]:
    """The contestant eager and compiled."""
    return [
        Contestant(f"{name} eager", "ours", load, THREE_MATMULS),
        Contestant(f"{name} compiled", "ours", compiled(load), THREE_MATMULS),
    ]


def partial(function: Any, *given: Any, **options: Any) -> Callable[[], Function]:
    return functools.partial(functools.partial, function, *given, **options)


UNIT = Contestant(THREE_MATMULS, "torch", lambda: products, unit=THREE_MATMULS)


def of_tokens(loss: str, peers: Sequence[Peer]) -> list[Contestant]:
    fn = LOSSES[loss]
    return [
        UNIT,
        *(both("xent token_weight", lambda: by_weights) if loss == "weights" else ()),
        *both("xent token loss", partial(by_function, fn)),
        Contestant("xent log-probs compiled", "ours", compiled(partial(by_log_probs, fn)), THREE_MATMULS),
        Contestant("torch compiled", "torch", compiled(partial(in_torch, fn)), THREE_MATMULS),
        *installed(peers, THREE_MATMULS),
    ]


def tokens(arguments: argparse.Namespace, setting: Setting) -> Found:
    if arguments.loss == "topk":
        return head_tables(arguments.shapes, arguments.hidden, of_top_classes(), setting, TopClasses), ()
    peers = (Peer(*LIGER, liger_grpo),) if arguments.loss == "clip" else ()
    known = of_tokens(arguments.loss, peers)
    make = functools.partial(Tokens, arguments.loss)
    return head_tables(arguments.shapes, arguments.hidden, known, setting, make), peers


# A teacher's most probable classes, and all others as one more class: (hidden, matrix, target, ids, probs).
CLASSES = 64


def of_top(log_q: Tensor, probs: Tensor) -> Tensor:
    """The loss of the log-probabilities of the ids, (..., K)."""
    left = torch.log((1 - log_q.exp().sum(-1)).clamp(min=torch.finfo(log_q.dtype).eps))
    return -(probs * log_q).sum(-1) - (1 - probs.sum(-1)) * left


def top_classes(hidden: Tensor, matrix: Tensor, _: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return xent_ops.linear_cross_entropy(hidden, matrix, ids, target_probs=probs, tail=True)


def top_by_log_probs(hidden: Tensor, matrix: Tensor, target: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return mean(of_top(xent_ops.linear_token_log_probs(hidden, matrix, ids).log_probs, probs), target)


def top_in_torch(hidden: Tensor, matrix: Tensor, target: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    log_q = F.linear(hidden, matrix).float().log_softmax(-1)
    return mean(of_top(log_q.gather(-1, ids.clamp(min=0)), probs), target)


def of_top_classes() -> list[Contestant]:
    return [
        UNIT,
        *both("xent target_probs", lambda: top_classes),
        Contestant("xent log-probs compiled", "ours", compiled(lambda: top_by_log_probs), THREE_MATMULS),
        Contestant("torch compiled", "torch", compiled(lambda: top_in_torch), THREE_MATMULS),
    ]


class TopClasses(Head):
    """The named classes have 0.9 of the teacher's probability, in falling shares; the target is the first of them."""

    slack = 2.0  # the probability of all other classes has the error of all logits

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, *given: Any) -> None:
        super().__init__(shape, dtype, device, *given)
        shares = torch.rand(shape.rows, CLASSES, generator=self.generator, device=device).sort(descending=True).values
        self.probs = 0.9 * shares / shares.sum(-1, keepdim=True)
        # Steps through all classes, so that the ids of a row differ.
        self.steps = torch.arange(CLASSES, device=device) * max(shape.classes // CLASSES, 1)
        self.ids = self._ids()

    def _ids(self) -> Tensor:
        ids = (self.target.clamp(min=0).unsqueeze(-1) + self.steps) % self.shape.classes
        return torch.where(self.target.unsqueeze(-1) == check.IGNORE_INDEX, check.IGNORE_INDEX, ids)

    def use_targets(self, which: int) -> None:
        super().use_targets(which)
        self.ids.copy_(self._ids())

    def row_tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.probs

    def share(self, options: check.Options) -> check.Share:
        def of_logits(logits: Tensor, part: slice) -> Tensor:
            log_q = logits.log_softmax(-1).gather(-1, self.ids[part].clamp(min=0))
            return of_top(log_q, self.probs[part].double())

        return check.mean(of_logits, self.target)


# Distillation: (hidden, matrix, target, teacher's hidden, teacher's matrix).
FOUR_PRODUCTS = "four products"  # three of the student, one of the teacher


def four_products(hidden: Tensor, matrix: Tensor, target: Tensor, teacher: Tensor, teacher_matrix: Tensor) -> Outputs:
    torch.mm(teacher, teacher_matrix.t())
    return products(hidden, matrix)


def distilled(hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Tensor, **options: Any) -> Tensor:
    return xent_ops.linear_distillation_loss(hidden, matrix, *teacher, target=target, **options)


def distilled_logits(hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Tensor, beta: float) -> Tensor:
    return xent_ops.distillation_loss(F.linear(hidden, matrix), F.linear(*teacher), target=target, beta=beta)


def divergences(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """The divergence of each row, as in TRL's generalized_jsd_loss."""
    log_s, log_t = logits.log_softmax(-1), teacher_logits.log_softmax(-1)

    def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    if beta == 0.0:
        return divergence(log_t, log_s)
    if beta == 1.0:
        return divergence(log_s, log_t)
    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
    return beta * divergence(log_t, log_m) + (1 - beta) * divergence(log_s, log_m)


def distilled_in_torch(hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Tensor, beta: float) -> Tensor:
    return mean(divergences(F.linear(hidden, matrix).float(), F.linear(*teacher).float(), beta), target)


def liger_jsd(beta: float) -> Function:
    """Liger-Kernel's Function, called eagerly. It compiles its chunks itself."""
    loss = imported("liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss")(0.0, 1.0, beta)
    return lambda hidden, matrix, target, *teacher: loss(hidden, matrix, *teacher, target, None, None)


def of_teacher(beta: float, peers: Sequence[Peer]) -> list[Contestant]:
    lines: list[tuple[str, str, Callable[[], Function]]] = [
        ("xent eager", "ours", partial(distilled, beta=beta)),
        ("xent compiled", "ours", compiled(partial(distilled, beta=beta))),
        ("xent skipping", "ours", partial(distilled, beta=beta, skip_ignored=True)),
        ("unfused xent compiled", "ours", compiled(partial(distilled_logits, beta=beta))),
        ("unfused torch compiled", "torch", compiled(partial(distilled_in_torch, beta=beta))),
    ]
    unit = Contestant(FOUR_PRODUCTS, "torch", lambda: four_products, unit=FOUR_PRODUCTS)
    found = [Contestant(*line, against=FOUR_PRODUCTS) for line in lines]
    return [unit, *found, *installed(peers, FOUR_PRODUCTS)]


class Distillation(Head):
    """Student and teacher are independent. The loss is about one; cross entropy is about eight."""

    slack, loss_slack = 2.0, 8.0

    def __init__(
        self, teacher: int, beta: float, shape: Shape, dtype: torch.dtype, device: torch.device, *given: Any
    ) -> None:
        super().__init__(shape, dtype, device, *given)
        new = functools.partial(torch.randn, generator=self.generator, device=device)
        self.beta = beta
        self.teacher = new(shape.rows, teacher).to(dtype)
        self.teacher_matrix = (new(shape.classes, teacher) / teacher**0.5).to(dtype)

    def row_tensors(self) -> tuple[Tensor, ...]:
        return self.teacher, self.teacher_matrix

    def share(self, options: check.Options) -> check.Share:
        matrix = self.teacher_matrix.double().T

        def of_logits(logits: Tensor, part: slice) -> Tensor:
            return divergences(logits, self.teacher[part].double() @ matrix, self.beta)

        return check.mean(of_logits, self.target)


def distillation(arguments: argparse.Namespace, setting: Setting) -> Found:
    peers = (Peer(*LIGER, functools.partial(liger_jsd, arguments.beta)),)
    known = of_teacher(arguments.beta, peers)
    make = functools.partial(Distillation, arguments.teacher, arguments.beta)
    return head_tables(arguments.shapes, arguments.hidden, known, setting, make), peers
