"""The heads that trainers run, beside the package's own: log-probabilities with entropies, and a teacher's loss."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial as bound
from typing import Any

import torch
from torch import Tensor

import xent_ops
from xent_ops.bench import check
from xent_ops.bench.arguments import Shape
from xent_ops.bench.check import Options
from xent_ops.bench.contestants import Contestant, Load, Outputs, partial, products, unit
from xent_ops.bench.problems import Setting
from xent_ops.bench.run import Table, tables_of

from . import peers
from .heads import ONE_MATMUL
from .tokens import (
    FOUR_PRODUCTS,
    Distillation,
    Stats,
    Tokens,
    by_function,
    clip,
    counted,
    distilled,
    four_products,
    grpo,
    logits_dtypes,
    mean,
    stats_of,
)

FOUR_MATMULS = "four matmuls"  # those of log-probabilities: the logits twice, and both gradients
WITHOUT_ENTROPY = {"entropy": False}


def all_four(hidden: Tensor, matrix: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    torch.mm(hidden, matrix.t())
    return products(hidden, matrix)


def log_probs(hidden: Tensor, matrix: Tensor, target: Tensor, *_: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return xent_ops.linear_token_log_probs(hidden, matrix, target, **options)[:2]


class LogProbs(Tokens):
    """GRPO with an entropy bonus of log-probabilities and entropies that a head returns.

    A contestant is a function of (hidden, matrix, target, old, factor) that returns log-probabilities and entropies, or
    the whole loss. A head without entropies has GRPO without the bonus. ``against`` one matmul it is a forward alone.
    """

    unit = FOUR_MATMULS

    def __init__(self, shape: Shape, hidden: int, setting: Setting) -> None:
        self.stats: list[Stats] = []  # in float64, of both targets
        super().__init__("grpo", shape, hidden, setting)

    def _log_probs(self, target: Tensor) -> Tensor:
        matrix, parts = self.matrix.double(), check.chunks(*self.shape, self.device)
        found = [stats_of(self.hidden[part].double() @ matrix.T, target[part]) for part in parts]
        self.stats.append(Stats(*map(torch.cat, zip(*found, strict=True))))
        return self.stats[-1].log_probs.float()

    def bind(self, contestant: Contestant) -> Callable[[], Outputs]:
        function, forward_alone = contestant.load(), contestant.against == ONE_MATMUL
        leaves = tuple(tensor.detach().requires_grad_() for tensor in self.inputs)
        target, *rows = (tensor.detach() for tensor in self.others)

        def run() -> Outputs:
            with torch.set_grad_enabled(not forward_alone):
                found = function(*leaves, target, *rows)
            if isinstance(found, Outputs):
                return found
            if isinstance(found, Tensor):
                return Outputs(found.detach(), torch.autograd.grad(found, leaves))
            values, entropy = found
            known = torch.stack([value.detach() for value in found if value is not None])
            if forward_alone:
                return Outputs(known, ())
            losses = clip(Stats(*[values] * 3), *rows) if entropy is None else grpo(Stats(*found, values), *rows)
            return Outputs(known, torch.autograd.grad(mean(losses, target), leaves))

        return run

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Errors:
        """The loss that a head returns, or else its log-probabilities and entropies, of the rows that are counted."""
        if outputs.loss.dim() == 0:
            return super().check(outputs, contestant)
        rows, limit = counted(self.target), check.tolerance(self.dtype)
        errors = {
            name: (check.norm_error(actual[rows], expected[rows]), limit)
            for name, actual, expected in zip(
                ("log-probs", "entropy"), outputs.loss, self.stats[self.which], strict=False
            )
        }
        if outputs.grads:
            loss = self.expected(contestant.options).loss  # the head's own was not kept
            found = super().check(Outputs(loss, outputs.grads), contestant)
            errors |= {name: error for name, error in found.items() if name != "loss"}
        return errors

    def expected_rows(self, logits: Tensor, part: slice, options: Options) -> tuple[Tensor, Tensor]:
        self.fn = grpo if options.get("entropy", True) else clip
        return super().expected_rows(logits, part, options)


def ours(**options: Any) -> Load:
    return partial(log_probs, **options)


def lines(dtype: torch.dtype) -> list[Contestant]:
    known = [
        unit(FOUR_MATMULS, lambda: all_four),
        unit(ONE_MATMUL, lambda: lambda hidden, matrix, *_: hidden @ matrix.T),
        Contestant("xent token loss", "ours", partial(by_function, grpo)),
        Contestant("xent log-probs", "ours", ours()),
    ]
    heads = {
        "TRL": (peers.trl_log_probs, ("trl",)),
        "verl": (peers.verl_log_probs, ("verl",)),
        "Liger scaled": (peers.liger_log_probs, ("liger_kernel", "cutlass")),
    }
    wide = dtype in (torch.bfloat16, torch.float16)
    if wide:
        known.append(Contestant("xent log-probs float32 logits", "ours", ours(logits_dtype=torch.float32)))
    known += [Contestant(name, "peer", *head, listed=True) for name, head in heads.items()]
    without = Contestant("F.linear_cross_entropy", "torch", peers.torch_log_probs, options=WITHOUT_ENTROPY)
    known += [without, Contestant("xent forward", "ours", ours(), against=ONE_MATMUL)]
    if wide:
        load = ours(logits_dtype=torch.float32)
        known.append(Contestant("xent forward float32 logits", "ours", load, against=ONE_MATMUL))
    for name, head in heads.items():
        known.append(Contestant(f"{name} forward", "peer", head[0], against=ONE_MATMUL))
    return [*known, Contestant("F.linear_cross_entropy forward", "torch", without.load, against=ONE_MATMUL)]


def kl(divergences: Any) -> Tensor:
    value: Tensor = divergences.kl
    return value


def of_tokens(hidden: Tensor, matrix: Tensor, target: Tensor, *teacher: Tensor, **options: Any) -> Tensor:
    return xent_ops.linear_distillation_token_loss(hidden, matrix, *teacher, kl, target=target, **options)


def teacher_lines(dtype: torch.dtype) -> list[Contestant]:
    known = [unit(FOUR_PRODUCTS, lambda: four_products)]
    for name, logits_dtype in logits_dtypes(dtype).items():
        known.append(Contestant(name, "ours", partial(distilled, beta=0.0, logits_dtype=logits_dtype)))
        known.append(Contestant(f"{name} token loss", "ours", partial(of_tokens, logits_dtype=logits_dtype)))
    return [*known, Contestant("TRL", "peer", lambda: peers.trl_divergence(0.0), ("trl",), listed=True)]


class NearTeacher(Distillation):
    """A student near the end of its distillation: the teacher's head, and hidden states that are two per cent away.

    The gradient is a difference of two close numbers, so that rounded logits show.
    """

    def __init__(self, shape: Shape, hidden: int, setting: Setting) -> None:
        super().__init__(hidden, 0.0, shape, hidden, setting)

    def teacher_head(self, classes: int, hidden: int) -> tuple[Tensor, Tensor]:
        return self.hidden + self.random(*self.hidden.shape, std=0.02), self.matrix

    def limits(self, outputs: Outputs, contestant: Contestant) -> tuple[float, float]:
        """No limits: this table is there to show the errors."""
        return 1e9, 1e9


def tables(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    found = tables_of(LogProbs, arguments.shapes, arguments.hidden, lines(setting.dtype), setting)
    known, problem = teacher_lines(setting.dtype), bound(Distillation, arguments.teacher, 0.0)
    fewer = [Shape(-(-shape.rows // 8), shape.classes) for shape in arguments.shapes]  # errors do not depend on them
    for name, cases in (
        ("teacher", tables_of(problem, arguments.shapes, (arguments.student,), known, setting)),
        ("near teacher", tables_of(NearTeacher, fewer, (arguments.student,), known, setting)),
    ):
        found += [case._replace(name=f"{case.name} {name}") for case in cases]
    return found
