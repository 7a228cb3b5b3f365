"""Losses of tokens from hidden states, a teacher's most probable classes, and a teacher's whole distribution."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial as bound
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops
from xent_ops.bench import check
from xent_ops.bench.arguments import Shape
from xent_ops.bench.check import Options
from xent_ops.bench.contestants import (
    THREE_MATMULS,
    Contestant,
    Function,
    Load,
    compiled,
    imported,
    partial,
    products,
    unit,
)
from xent_ops.bench.problems import Head, Setting
from xent_ops.bench.run import Table, tables_of
from xent_ops.testing import distillation_oracle

Stats = xent_ops.TokenLogProbs


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


CLASSES = 64  # a teacher's most probable ones


def top_loss(stats: Stats, probs: Tensor) -> Tensor:
    """The cross entropy of a teacher's most probable classes, with all others as one more class."""
    log_q = stats.log_probs
    left = torch.log((1 - log_q.exp().sum(-1)).clamp(min=torch.finfo(log_q.dtype).eps))
    return -(probs * log_q).sum(-1) - (1 - probs.sum(-1)) * left


LOSSES: dict[str, Callable[..., Tensor]] = {"grpo": grpo, "clip": clip, "weights": weights, "topk": top_loss}
SEQUENCE = 1024  # tokens that share an advantage, if it divides the number of rows; otherwise all tokens do


def sequence(rows: int) -> int:
    return SEQUENCE if rows % SEQUENCE == 0 else rows


def counted(target: Tensor) -> Tensor:
    """The rows that are not ignored, of one class a row or several."""
    return target.view(len(target), -1)[:, 0] != check.IGNORE_INDEX


def mean(rows: Tensor, target: Tensor) -> Tensor:
    return torch.where(counted(target), rows, 0.0).sum() / counted(target).sum()


def stats_of(logits: Tensor, target: Tensor) -> Stats:
    lse = logits.logsumexp(-1)
    log_probs = logits - lse.unsqueeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return Stats(log_probs.gather(-1, target.view(len(target), -1).clamp(min=0)).view(target.shape), entropy, lse)


# The next functions take (hidden, matrix, target, *rows): for most losses old log-probabilities and factors of tokens.


def by_function(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *rows: Tensor) -> Tensor:
    return xent_ops.linear_token_loss(hidden, matrix, target, fn, rows=rows)


def by_log_probs(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *rows: Tensor) -> Tensor:
    return mean(fn(xent_ops.linear_token_log_probs(hidden, matrix, target), *rows), target)


def in_torch(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *rows: Tensor) -> Tensor:
    return mean(fn(stats_of(F.linear(hidden, matrix).float(), target), *rows), target)


def by_weights(hidden: Tensor, matrix: Tensor, target: Tensor, old: Tensor, factor: Tensor) -> Tensor:
    return xent_ops.linear_cross_entropy(
        hidden, matrix, target, token_weight=factor, reduction="sum", divisor=counted(target).sum()
    )


def top_classes(hidden: Tensor, matrix: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return xent_ops.linear_top_k_distillation_loss(hidden, matrix, ids, probs, tail=True)


def liger_grpo() -> Function:
    """Liger-Kernel's GRPO of sequences, with the mean over tokens ("bnpo"). Its input is (sequences, tokens, H)."""
    kind = imported("liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss")()
    loss = kind(beta=0.0, loss_type="bnpo", use_ref_model=False)

    def call(hidden: Tensor, matrix: Tensor, target: Tensor, old: Tensor, factor: Tensor) -> Any:
        target, old, factor = (values.view(-1, sequence(target.numel())) for values in (target, old, factor))
        mask = (target != check.IGNORE_INDEX).float()
        rows = hidden.view(*target.shape, -1)
        return loss(rows, matrix, target.clamp(min=0), mask, factor[:, 0], old_per_token_logps=old)[0]

    return call


class Tokens(Head):
    """A loss of tokens: ``others`` are the targets and the tensors with one value for each row.

    Ratios of new to old probabilities are between .9 and 1.1. At a bound rounding would decide, so none is there.
    """

    # The relative error of a ratio is the absolute error of a logit. The loss is about one, and cross entropy eight.
    slack, loss_slack = 2.0, 8.0

    def __init__(self, loss: str, shape: Shape, hidden: int, setting: Setting) -> None:
        super().__init__(shape, hidden, setting)
        self.fn = LOSSES[loss]
        self.factor = torch.rand(shape.rows, generator=self.generator, device=self.device) + 0.5
        if loss == "clip":  # one factor for each sequence
            length = sequence(shape.rows)
            self.factor = self.factor.view(-1, length)[:, :1].expand(-1, length).flatten()
        noise = torch.rand(shape.rows, generator=self.generator, device=self.device) * 0.18 - 0.09
        self.olds = [self._log_probs(target) + noise for target in self.targets]
        self.old = self.olds[0].clone()
        self.others = (self.target, self.old, self.factor)

    def _log_probs(self, target: Tensor) -> Tensor:
        matrix, parts = self.matrix.double(), check.chunks(*self.shape, self.device)
        found = [stats_of(self.hidden[part].double() @ matrix.T, target[part]).log_probs for part in parts]
        return torch.cat(found).float()

    def use_targets(self, which: int) -> None:
        super().use_targets(which)
        self.old.copy_(self.olds[which])

    def expected_rows(self, logits: Tensor, part: slice, options: Options) -> tuple[Tensor, Tensor]:
        target, *rows = (tensor[part] for tensor in self.others)
        z = logits.detach().requires_grad_()
        losses = self.fn(stats_of(z, target), *(row.double() for row in rows))
        value = torch.where(counted(target), losses, 0.0).sum() / counted(self.target).sum()
        (grad,) = torch.autograd.grad(value, z)
        return value.detach(), grad


class TopClasses(Tokens):
    """A teacher's most probable classes, and all others as one more class.

    The named classes have 0.9 of the teacher's probability, in falling shares. The first of them is the target.
    """

    loss_slack = 1.0

    def __init__(self, loss: str, shape: Shape, hidden: int, setting: Setting) -> None:
        Head.__init__(self, shape, hidden, setting)
        self.fn = top_loss
        shares = torch.rand(shape.rows, CLASSES, generator=self.generator, device=self.device)
        self.probs = 0.9 * shares.sort(descending=True).values / shares.sum(-1, keepdim=True)
        # Steps through all classes, so that the ids of a row differ.
        self.steps = torch.arange(CLASSES, device=self.device) * max(shape.classes // CLASSES, 1)
        self.ids = self._ids()
        self.others = (self.ids, self.probs)

    def _ids(self) -> Tensor:
        target = self.target.unsqueeze(-1)
        return torch.where(target == check.IGNORE_INDEX, target, (target + self.steps) % self.shape.classes)

    def use_targets(self, which: int) -> None:
        Head.use_targets(self, which)
        self.ids.copy_(self._ids())


def both(name: str, load: Load) -> list[Contestant]:
    """The contestant eager and compiled."""
    return [Contestant(f"{name} eager", "ours", load), Contestant(f"{name} compiled", "ours", compiled(load))]


def token_lines(loss: str) -> list[Contestant]:
    fn = LOSSES[loss]
    found = [unit(THREE_MATMULS, lambda: products), *both("xent token loss", partial(by_function, fn))]
    if loss == "weights":
        found += both("xent token_weight", partial(by_weights))
    if loss == "topk":
        found += both("xent top k", partial(top_classes))
    found.append(Contestant("xent log-probs compiled", "ours", compiled(partial(by_log_probs, fn))))
    found.append(Contestant("torch compiled", "torch", compiled(partial(in_torch, fn))))
    if loss == "clip":
        found.append(Contestant("liger-kernel", "peer", liger_grpo, ("liger_kernel",)))
    return found


def tokens(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    problem = bound(TopClasses if arguments.loss == "topk" else Tokens, arguments.loss)
    return tables_of(problem, arguments.shapes, arguments.hidden, token_lines(arguments.loss), setting)


# Distillation: (hidden, matrix, target, teacher's hidden, teacher's matrix).
FOUR_PRODUCTS = "four products"  # three of the student, one of the teacher


def four_products(
    hidden: Tensor, matrix: Tensor, target: Tensor, teacher: Tensor, teacher_matrix: Tensor, *_: Any
) -> tuple[Tensor, ...]:
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
    loss = imported("liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss")()(0.0, 1.0, beta)
    return lambda hidden, matrix, target, *teacher: loss(hidden, matrix, *teacher, target, None, None)


def by_divergences(hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Tensor, beta: float) -> Tensor:
    """The same of the divergences of tokens, as a loss that mixes tokens has them."""
    field = {0.0: "kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    options = {"target": target, "fields": (field,), "beta": beta if field == "jsd" else 0.5}
    return mean(getattr(xent_ops.linear_token_divergences(hidden, matrix, *teacher, **options), field), target)


def logits_dtypes(dtype: torch.dtype) -> dict[str, torch.dtype | None]:
    """The dtypes that two heads' logits may have, by the names of their lines. The first is the default."""
    if dtype not in (torch.bfloat16, torch.float16):
        return {"xent": None}
    return {f"xent {str(of_logits).removeprefix('torch.')} logits": of_logits for of_logits in (torch.float32, dtype)}


def teacher_lines(beta: float, dtype: torch.dtype, chunk_rows: Sequence[int] = ()) -> list[Contestant]:
    ours = []
    for (name, logits_dtype), rows in itertools.product(logits_dtypes(dtype).items(), chunk_rows or (None,)):
        options = {"beta": beta, "logits_dtype": logits_dtype, "chunk_rows": rows}
        ours += both(name if rows is None else f"{name} {rows} rows", partial(distilled, **options))
    return [
        unit(FOUR_PRODUCTS, lambda: four_products),
        *ours,
        Contestant("xent skipping", "ours", partial(distilled, beta=beta, skip_ignored=True)),
        Contestant("xent token divergences", "ours", partial(by_divergences, beta=beta)),
        Contestant("unfused xent compiled", "ours", compiled(partial(distilled_logits, beta=beta))),
        Contestant("unfused torch compiled", "torch", compiled(partial(distilled_in_torch, beta=beta))),
        Contestant("liger-kernel", "peer", lambda: liger_jsd(beta), ("liger_kernel",)),
    ]


class Distillation(Head):
    """Student and teacher are independent. The loss is about one; cross entropy is about eight."""

    unit = FOUR_PRODUCTS
    slack, loss_slack = 2.0, 8.0

    def __init__(self, teacher: int, beta: float, shape: Shape, hidden: int, setting: Setting) -> None:
        super().__init__(shape, hidden, setting)
        self.beta = beta
        self.teacher, self.teacher_matrix = self.teacher_head(shape.classes, teacher)
        self.others = (self.target, self.teacher, self.teacher_matrix)

    def teacher_head(self, classes: int, hidden: int) -> tuple[Tensor, Tensor]:
        return self.random(self.shape.rows, hidden), self.random(classes, hidden, std=1 / math.sqrt(hidden))

    def expected_rows(self, logits: Tensor, part: slice, options: Options) -> tuple[Tensor, Tensor]:
        teacher_logits = self.teacher[part].double() @ self.teacher_matrix.double().T
        scale = 1 / counted(self.target).sum()
        expected = distillation_oracle(
            logits, teacher_logits, self.target[part], grad_loss=scale, beta=self.beta, device=self.device
        )
        return expected.loss.sum() * scale, expected.grad


def distillation(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    known = teacher_lines(arguments.beta, setting.dtype, arguments.chunk_rows or ())
    problem = bound(Distillation, arguments.teacher, arguments.beta)
    return tables_of(problem, arguments.shapes, arguments.hidden, known, setting)
