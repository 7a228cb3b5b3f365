"""``check=True``: the arguments of all ranks, checked and compared before the loss is computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import arguments, checks, transforms
from .groups import Group, Ranks, process_group, ranks_of
from .parts import shard_range_of

NAME = "xent_ops.distributed.vocab_parallel_cross_entropy"


def check(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    group: Group,
    num_classes: Any,
    class_start: Any,
    options: tuple[Any, Any, Any, Any, Any, str],  # as arguments.loss_options takes them
) -> None:
    """Raise the same error on every rank of the group if an argument of one is wrong, or they do not fit together.

    Arguments are those of ``vocab_parallel_cross_entropy``, as the user passed them.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("check=True compares values between ranks, which a compiled graph cannot: use it in eager")
    ranks = ranks_of(group)
    try:
        report = _report(logits, target, weight, ranks, num_classes, class_start, options)
    except Exception as error:  # the other ranks must get a report, or they wait for this one
        report = {"error": f"{type(error).__name__}: {error}"}
    reports: list[dict[str, Any]] = [{} for _ in range(ranks.world)]
    with torch._C._DisableFuncTorch():  # a rank below a transform must report that error too
        dist.all_gather_object(reports, report, group=process_group(group))
    problem = _compare(reports)
    if problem is not None:
        raise ValueError(f"vocab_parallel_cross_entropy: {problem}")


def _report(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ranks: Ranks,
    num_classes: Any,
    class_start: Any,
    options: tuple[Any, Any, Any, Any, Any, str],  # as arguments.loss_options takes them
) -> dict[str, Any]:
    """The arguments of this rank. Raises every error that this rank can detect by itself."""
    transforms.refuse(NAME)
    arguments.tensors(logits, target, weight, "logits_shard")
    loss = arguments.loss_options(*options, logits.dtype)
    start, num_classes = shard_range_of(logits, num_classes, class_start, ranks)
    checks.shard(logits, target, start, num_classes, weight, options=loss.rows)
    checks.weight_without_grad(weight)
    checks.check_targets(target, num_classes, loss.rows.ignore_index)
    return {
        "target shape": tuple(target.shape),
        "accumulation in": "float64" if logits.dtype == torch.float64 else "float32",
        "num_classes": num_classes,
        "class weights": weight is not None,
        **loss.rows._asdict(),
        "lse_square_scale": loss.lse_square_scale,
        "reduction": loss.reduction,
        "target": target.to(torch.int64).cpu(),
        "shard": (start, min(logits.shape[-1], num_classes - start)),
    }


def _compare(reports: list[dict[str, Any]]) -> str | None:
    errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if "error" in report]
    if errors:
        return "; ".join(errors)
    first = reports[0]
    for name, value in first.items():
        if name == "shard":
            continue
        for rank, report in enumerate(reports):
            if name == "target":
                rows = (report[name] != value).reshape(-1).nonzero()
                if len(rows):
                    row = int(rows[0])
                    mine, theirs = int(value.reshape(-1)[row]), int(report[name].reshape(-1)[row])
                    return (
                        f"targets differ between ranks: row {row} is {mine} on rank 0 but {theirs} on rank {rank} "
                        f"({len(rows)} of {value.numel()} rows differ)"
                    )
            elif report[name] != value:
                return (
                    f"{name} is {value} on rank 0 but {report[name]} on rank {rank}; it must be the same on every rank"
                )
    end = 0
    for rank, (start, size) in sorted(((r, report["shard"]) for r, report in enumerate(reports)), key=lambda s: s[1]):
        if size and start != end:
            what = "a gap" if start > end else "an overlap"
            return f"{what} between shards: rank {rank} starts at class {start}, the one before ends at {end}"
        end += size
    num_classes = first["num_classes"]
    return None if end == num_classes else f"the shards end at class {end}, not at num_classes={num_classes}"
