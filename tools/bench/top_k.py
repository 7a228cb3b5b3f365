"""The k most probable classes of each row from hidden states, without gradients, beside one multiplication."""

from __future__ import annotations

import argparse
from functools import partial as bound
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops
from xent_ops.bench.check import Options
from xent_ops.bench.contestants import Contestant, Outputs, compiled, partial
from xent_ops.bench.problems import Head, Setting
from xent_ops.bench.run import Table, tables_of

from .heads import ONE_MATMUL, UNITS
from .tokens import counted, mean


def number(log_probs: Tensor, rank: Tensor | None) -> Tensor:
    """(rows,): of the log-probabilities of k classes and the rank of the target, if there is one, for the check."""
    found = log_probs.double().mean(-1)
    return found if rank is None else found - rank.double().log1p()


# The next functions take (hidden, matrix, target).


def ours(hidden: Tensor, matrix: Tensor, target: Tensor, k: int, ranks: bool) -> Outputs:
    with torch.no_grad():
        top = xent_ops.linear_top_k(hidden, matrix, k, target if ranks else None)
        return Outputs(mean(number(top.log_probs, top.target_ranks), target), ())


def of_logits(logits: Tensor, target: Tensor, k: int, ranks: bool) -> Tensor:
    """(rows,), by torch.topk, which leaves open which of equal logits it takes."""
    log_probs = logits.topk(k).values - logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1, True)
    if not ranks:
        return number(log_probs, None)
    index = target.clamp(min=0).unsqueeze(-1)
    own, columns = logits.gather(-1, index), torch.arange(logits.shape[-1], device=logits.device)
    return number(log_probs, ((logits > own) | ((logits == own) & (columns < index))).sum(-1))


def in_torch(hidden: Tensor, matrix: Tensor, target: Tensor, k: int, ranks: bool) -> Outputs:
    with torch.no_grad():
        return Outputs(mean(of_logits(F.linear(hidden, matrix), target, k, ranks), target), ())


class Classes(Head):
    unit = ONE_MATMUL

    def expected_rows(self, logits: Tensor, part: slice, options: Options) -> tuple[Tensor, Tensor]:
        target = self.target[part]
        rows = torch.where(counted(target), of_logits(logits, target, **options), 0.0)
        return rows.sum() / counted(self.target).sum(), torch.zeros_like(logits)


def lines(k: int) -> list[Contestant]:
    known = []
    for ranks, end in ((False, ""), (True, " and ranks")):
        options: dict[str, Any] = {"k": k, "ranks": ranks}
        line = bound(Contestant, options=options)
        known += [
            line(f"xent {k}{end}", "ours", partial(ours, **options)),
            line(f"xent {k}{end} compiled", "ours", compiled(partial(ours, **options))),
            line(f"torch.topk {k}{end} compiled", "torch", compiled(partial(in_torch, **options))),
        ]
    return known


def tables(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    known = [one for one in UNITS if one.name == ONE_MATMUL]
    for k in arguments.k:
        known += lines(k)
    return tables_of(Classes, arguments.shapes, arguments.hidden, known, setting)
