"""``check=True``: the arguments of all ranks, checked and compared before the loss is computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import checks, transforms
from .groups import Group, Place, place, process_group
from .parts import first_class

NAME = "xent_ops.distributed.vocab_parallel_cross_entropy"


def check(logits: Tensor, target: Tensor, group: Group, **arguments: Any) -> None:
    """Raise the same error on every rank of the group if an argument of one is wrong, or they do not fit together.

    Arguments are those of ``vocab_parallel_cross_entropy``, as the user passed them.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("check=True compares values between ranks, which a compiled graph cannot: use it in eager")
    here = place(group)
    try:
        report = _report(logits, target, here, **arguments)
    except Exception as error:  # another rank must hear of it, or it waits for this one
        report = {"error": f"{type(error).__name__}: {error}"}
    reports: list[dict[str, Any]] = [{} for _ in range(here.world)]
    with torch._C._DisableFuncTorch():  # a rank below a transform, which is an error of its own, reports that too
        dist.all_gather_object(reports, report, group=process_group(group))
    problem = _compare(reports)
    if problem is not None:
        raise ValueError(f"vocab_parallel_cross_entropy: {problem}")


def _report(
    logits: Tensor,
    target: Tensor,
    here: Place,
    *,
    num_classes: Any,
    class_start: Any,
    weight: Tensor | None,
    ignore_index: Any,
    reduction: str,
    label_smoothing: Any,
    lse_square_scale: Any,
    softcap: Any,
    logit_scale: Any,
) -> dict[str, Any]:
    """What this rank passed. All that it can refuse by itself is an error in here, and not later."""
    transforms.refuse(NAME)
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, _ = checks.arguments(
        logits,
        target,
        weight,
        ignore_index,
        label_smoothing,
        lse_square_scale,
        softcap,
        logit_scale,
        reduction,
        input_name="logits_shard",
    )
    num_classes, class_start = shard_range(logits, num_classes, class_start)
    start = first_class(logits.shape[-1], class_start, num_classes, here)
    operator_options = {"label_smoothing": label_smoothing, "softcap": softcap, "logit_scale": logit_scale}
    checks.shard(logits, target, start, num_classes, weight, **operator_options)
    checks.weight_without_grad(weight)
    checks.check_targets(target, num_classes, ignore_index)
    return {
        "target shape": tuple(target.shape),
        "accumulation in": "float64" if logits.dtype == torch.float64 else "float32",
        "num_classes": num_classes,
        "class weights": weight is not None,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "lse_square_scale": lse_square_scale,
        **operator_options,
        "target": target.to(torch.int64).cpu(),
        "shard": (start, min(logits.shape[-1], num_classes - start)),
    }


def shard_range(logits: Tensor, num_classes: Any, class_start: Any) -> tuple[int, int | None]:
    """(num_classes, class_start) as integers, for logits that have columns of their own."""
    if type(logits) is not Tensor and hasattr(logits, "device_mesh"):
        raise TypeError("logits_shard is a DTensor: pass logits_shard.to_local(), or call xent_ops.cross_entropy")
    if logits.dim() < 1:
        raise ValueError("logits_shard has no dimension; expected (..., columns of this rank)")
    start = None if class_start is None else checks.integer("class_start", class_start)
    return checks.integer("num_classes", num_classes), start


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
