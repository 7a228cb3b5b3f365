"""``check=True``: the arguments of all ranks, checked and compared before the loss is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.options import LossOptions
from ..kernels.reference_shard import columns_of
from ..ops import checks
from .groups import Group, Ranks, process_group


def check(name: str, group: Group, ranks: Ranks, report: Callable[[], dict[str, Any]]) -> None:
    """Raise the same error on every rank of the group if an argument of one is wrong, or they do not fit together.

    ``report`` returns the arguments of this rank, and raises every error that this rank can detect by itself.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("check=True compares values between ranks, which a compiled graph cannot: use it in eager")
    try:
        found = report()
    except Exception as error:  # the other ranks must get a report, or they wait for this one
        found = {"error": f"{type(error).__name__}: {error}"}
    reports: list[dict[str, Any]] = [{} for _ in range(ranks.world)]
    with torch._C._DisableFuncTorch():  # a rank below a transform must report that error too
        dist.all_gather_object(reports, found, group=process_group(group))
    problem = _compare(reports)
    if problem is not None:
        raise ValueError(f"{name}: {problem}")


def report(
    dtype: torch.dtype, columns: int, target: Tensor, weighted: bool, shard_range: tuple[int, int], loss: LossOptions
) -> dict[str, Any]:
    """What all ranks must agree on, and the classes of this one. Reads the target."""
    start, num_classes = shard_range
    checks.check_targets(target, num_classes, loss.rows.ignore_index)
    return {
        "target shape": tuple(target.shape),
        "accumulation in": "float64" if dtype == torch.float64 else "float32",
        "num_classes": num_classes,
        "class weights": weighted,
        **loss.rows._asdict(),
        "lse_square_scale": loss.lse_square_scale,
        "reduction": loss.reduction,
        "target": target.to(torch.int64).cpu(),
        "shard": (start, columns_of(columns, start, num_classes)),
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
