"""Losses of draft models: functions of a token's divergences between two heads."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial as bound
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops
from xent_ops.bench.arguments import Shape
from xent_ops.bench.check import Options
from xent_ops.bench.contestants import Contestant, Function, compiled, imported, partial, unit
from xent_ops.bench.problems import Head, Setting
from xent_ops.bench.run import Table, tables_of

from .tokens import FOUR_PRODUCTS, Distillation, both, counted, four_products, logits_dtypes, mean


class Pair(NamedTuple):
    """The divergences that the losses read, by the names of ``xent_ops.TokenDivergences``."""

    kl: Tensor
    overlap: Tensor


def tv(d: Any) -> Tensor:
    """The total variation."""
    return 1 - d.overlap


def nla(d: Any) -> Tensor:
    """Minus the log of the acceptance rate."""
    return -d.overlap.clamp(min=1e-5).log()


def lk(d: Any) -> Tensor:
    """KL where the overlap is small, else total variation."""
    weight = (-3 * d.overlap.detach()).exp()
    return weight * d.kl + (1 - weight) * (1 - d.overlap)


LOSSES: dict[str, Callable[[Any], Tensor]] = {"tv": tv, "nla": nla, "lk": lk}
FUSED = {"tv": "fused_tv_loss", "nla": "fused_nla_loss", "lk": "fused_lk_hybrid_loss"}  # of speculators 0.9.0


def pair_of(logits: Tensor, teacher_logits: Tensor, classes: Tensor | None) -> Pair:
    """The formulas of speculators; with a draft vocabulary those of SpecForge, which has two teachers then: KL takes
    the one that is renormalised to the classes, the acceptance rate its probabilities among all classes."""
    named = teacher_logits if classes is None else teacher_logits[:, classes]
    t = named.softmax(-1)
    of_all = t if classes is None else (named - teacher_logits.logsumexp(-1, keepdim=True)).exp()
    kl = F.kl_div(logits.log_softmax(-1), t, reduction="none").sum(-1)
    return Pair(kl, torch.minimum(logits.softmax(-1), of_all).sum(-1))


# The next functions take (hidden, matrix, target, teacher's hidden, teacher's matrix, classes or None).


def fused(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Any, **options: Any) -> Tensor:
    *heads, classes = teacher
    options |= {"target": target, "classes": classes}
    return xent_ops.linear_distillation_token_loss(hidden, matrix, *heads, fn, **options)


def of_logits(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Any) -> Tensor:
    *heads, classes = teacher
    logits = F.linear(hidden, matrix), F.linear(*heads)
    return xent_ops.distillation_token_loss(*logits, fn, target=target, classes=classes)


def in_torch(fn: Any, hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Any) -> Tensor:
    *heads, classes = teacher
    return mean(fn(pair_of(F.linear(hidden, matrix).float(), F.linear(*heads).float(), classes)), target)


def speculators(loss: str) -> Function:
    """The kernels of speculators. Their logits are (1, tokens, classes)."""
    rows = imported("speculators.losses.fused", FUSED[loss])()

    def call(hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Any) -> Tensor:
        return mean(rows(F.linear(hidden, matrix)[None], F.linear(*teacher[:2])[None])[0], target)

    return call


class Divergences(Distillation):
    """A draft model of ``draft`` classes, or of all, beside a teacher of ``shape.classes``.

    The overlap's gradient is discontinuous: of rounded logits, float64 has the logits rounded to their dtype.
    """

    def __init__(self, loss: str, teacher: int, draft: int | None, shape: Shape, hidden: int, setting: Setting) -> None:
        Head.__init__(self, shape if draft is None else Shape(shape.rows, draft), hidden, setting)
        self.fn, all_classes = LOSSES[loss], shape.classes
        self.teacher, self.teacher_matrix = self.teacher_head(all_classes, teacher)
        steps = torch.arange(self.shape.classes, device=self.device) * all_classes
        self.classes = None if draft is None else steps // draft
        self.others = (self.target, self.teacher, self.teacher_matrix, self.classes)

    def expected_rows(self, logits: Tensor, part: slice, options: Options) -> tuple[Tensor, Tensor]:
        teacher_logits = self.teacher[part].double() @ self.teacher_matrix.double().T
        z = logits.detach()
        if options.get("rounded", True):
            z, teacher_logits = z.to(self.dtype).double(), teacher_logits.to(self.dtype).double()
        z.requires_grad_()
        losses = self.fn(pair_of(z, teacher_logits, self.classes))
        value = torch.where(counted(self.target[part]), losses, 0.0).sum() / counted(self.target).sum()
        (grad,) = torch.autograd.grad(value, z)
        return value.detach(), grad


def lines(loss: str, draft: int | None, dtype: torch.dtype) -> list[Contestant]:
    fn, ours = LOSSES[loss], []
    for name, logits_dtype in logits_dtypes(dtype).items():
        for line in both(name, partial(fused, fn, logits_dtype=logits_dtype)):
            ours.append(dataclasses.replace(line, options={"rounded": logits_dtype != torch.float32}))
    theirs = "speculators" if draft is None else "SpecForge"
    found = [
        unit(FOUR_PRODUCTS, lambda: four_products),
        *ours,
        Contestant("unfused xent compiled", "ours", compiled(partial(of_logits, fn))),
        Contestant(f"formulas of {theirs} compiled", "torch", compiled(partial(in_torch, fn))),
    ]
    if draft is None:
        found.append(Contestant("speculators", "peer", lambda: speculators(loss), ("speculators",)))
    return found


def tables(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    if arguments.draft is not None and arguments.draft > min(shape.classes for shape in arguments.shapes):
        raise ValueError(f"--draft {arguments.draft}: the teacher of --shapes has fewer classes")
    problem = bound(Divergences, arguments.loss, arguments.teacher, arguments.draft)
    known = lines(arguments.loss, arguments.draft, setting.dtype)
    return tables_of(problem, arguments.shapes, arguments.hidden, known, setting)
