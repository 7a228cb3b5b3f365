"""``check=True``: the arguments of all ranks, checked and compared before the loss is computed.

A function over ranks binds its arguments to a record, a NamedTuple that may hold others. It computes from that record
alone. ``report`` compares all fields of the record, so a new argument needs no code here. Only a new tensor needs an
entry in ``_TENSORS``; without the entry ``report`` raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._private import private
from ..kernels.reference import columns_of
from ..ops import arguments, transforms
from .groups import Group, Ranks, process_group

_Record = TypeVar("_Record")

_without_transforms = private(
    "torch._C._DisableFuncTorch", contextlib.nullcontext, "check=True fails inside torch.func"
)


def _wants_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _shape_and_dtype(name: str) -> dict[str, Callable[[Tensor], Any]]:
    return {f"{name}.shape": lambda t: tuple(t.shape), f"{name}.dtype": lambda t: t.dtype}


# Field: the argument's name, and its properties that all ranks must agree on. Every rank must pass it, or none.
_TENSORS: dict[str, tuple[str, dict[str, Callable[[Tensor], Any]]]] = {
    "target": ("target", {"target.shape": lambda t: tuple(t.shape), "targets": lambda t: t.to(torch.int64).cpu()}),
    "logits": ("logits_shard", {"accumulation in": lambda t: "float64" if t.dtype == torch.float64 else "float32"}),
    "input": ("input", {**_shape_and_dtype("input"), "input.requires_grad": _wants_grad}),
    # Shape and dtype of the head follow from the input's.
    "weight": ("linear_weight", {"linear_weight.requires_grad": _wants_grad}),
    "bias": ("linear_bias", {"linear_bias.requires_grad": _wants_grad}),
    "teacher_input": ("teacher_input", _shape_and_dtype("teacher_input")),
    "teacher_weight": ("teacher_weight", {}),
    "teacher_bias": ("teacher_bias", {}),
    "classes": ("classes", {}),
    "class_weight": ("weight (class weights)", {}),
    "token_weight": (
        "token_weight",
        {"token_weight.shape": lambda t: tuple(t.shape), "token weights": lambda t: t.double().cpu()},
    ),
    "ids": ("ids", {"ids.shape": lambda t: tuple(t.shape), "ids": lambda t: t.to(torch.int64).cpu()}),
    "probs": ("probs", {"probs.dtype": lambda t: t.dtype, "probabilities": lambda t: t.double().cpu()}),
    "divisor": ("divisor", {"divisor": lambda t: repr(float(t))}),  # as text, in which NaN equals NaN
}


def bind_and_compare(name: str, group: Group, ranks: Ranks, bind: Callable[[], _Record], check: bool) -> _Record:
    """The record of this rank's arguments, which ``bind`` returns. It raises every error that this rank can detect by
    itself, with ``check`` also those that depend on data.

    With ``check`` every rank of the group raises the same error if an argument of any rank is wrong, or arguments do
    not match.
    """
    if not arguments.boolean("check", check):
        transforms.refuse(f"xent_ops.{name}")
        return bind()
    if torch.compiler.is_compiling():
        raise RuntimeError("check=True compares values between ranks, which a compiled graph cannot: use it in eager")
    record, found = None, {}
    try:
        transforms.refuse(f"xent_ops.{name}")
        record = bind()
        found = report(record)
    except Exception as error:  # the other ranks must get a report, or they wait for this one
        found = {"error": f"{type(error).__name__}: {error}"}
    reports: list[dict[str, Any]] = [{} for _ in range(ranks.world)]
    with _without_transforms():  # a rank inside a transform must report that error too
        dist.all_gather_object(reports, found, group=process_group(group))
    problem = _compare(reports)
    if problem is not None:
        raise ValueError(f"{name}: {problem}")
    assert record is not None
    return record


def report(record: Any) -> dict[str, Any]:
    """The values that all ranks must agree on, by name. Reads the target.

    "shard" holds this rank's classes. "teacher rows" has the sum of each row of its teacher's head, to tell them apart.
    """
    facts: dict[str, Any] = {}
    for field, value in record._asdict().items():
        value = value.agreed() if hasattr(value, "agreed") else value
        if hasattr(value, "_asdict"):
            facts |= report(value)
        elif field == "shard_range":
            class_start, facts["num_classes"] = value
            columns = record.logits.shape[-1] if hasattr(record, "logits") else record.weight.shape[0]
            facts["shard"] = class_start, columns_of(columns, *value)
        elif field in _TENSORS:
            name, agreed = _TENSORS[field]
            facts[name] = None if value is None else "a tensor"
            facts |= {what: None if value is None else of(value) for what, of in agreed.items()}
            if field == "teacher_weight":
                facts["teacher rows"] = value.detach().sum(1, dtype=torch.float64).cpu()
        elif field == "rows":  # arguments of a user's token loss
            facts["the number of rows"] = len(value)
            for i, row in enumerate(value):
                facts |= {f"rows[{i}].shape": tuple(row.shape), f"rows[{i}].dtype": row.dtype, f"rows[{i}]": row.cpu()}
        elif isinstance(value, Tensor):
            raise AssertionError(f"no entry in _TENSORS says what ranks must agree on of {field}")
        else:
            facts[field] = value
    return facts


def _compare(reports: list[dict[str, Any]]) -> str | None:
    errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if "error" in report]
    if errors:
        return "; ".join(errors)
    first = reports[0]
    for name, value in first.items():
        if name in ("shard", "teacher rows"):
            continue
        for rank, report in enumerate(reports):
            if isinstance(value, Tensor):
                other = report[name]
                positions = ((other != value) & ~(other.isnan() & value.isnan())).reshape(-1).nonzero()
                if len(positions):
                    position = int(positions[0])
                    mine, theirs = value.reshape(-1)[position].item(), other.reshape(-1)[position].item()
                    return (
                        f"{name} differ between ranks: number {position} is {mine} on rank 0 but {theirs} on rank "
                        f"{rank} ({len(positions)} of {value.numel()} differ)"
                    )
            elif report[name] != value:
                return (
                    f"{name} is {value} on rank 0 but {report[name]} on rank {rank}; it must be the same on every rank"
                )
    problem = _teacher_of_every_rank([report["teacher rows"] for report in reports if "teacher rows" in report])
    if problem is not None:
        return problem
    end = 0
    for rank, (start, size) in sorted(((r, report["shard"]) for r, report in enumerate(reports)), key=lambda s: s[1]):
        if size and start != end:
            what = "a gap" if start > end else "an overlap"
            return f"{what} between shards: rank {rank} starts at class {start}, the one before ends at {end}"
        end += size
    num_classes = first["num_classes"]
    return None if end == num_classes else f"the shards end at class {end}, not at num_classes={num_classes}"


def _teacher_of_every_rank(row_sums: list[Tensor]) -> str | None:
    """Nobody says how many classes the teacher has where ``classes`` names the student's. Its whole head on each rank
    would count each class once a rank. Rows that are all equal say nothing.
    """
    for rank, sums in enumerate(row_sums):
        for other in range(rank):
            if sums.numel() > 0 and not bool((sums == sums[0]).all()) and torch.equal(sums, row_sums[other]):
                return (
                    f"the teacher's head has the same {len(sums)} rows on ranks {other} and {rank}; each rank passes "
                    "its own slice of the teacher's classes, and classes= names rows of that slice"
                )
    return None
