"""All contestants on one problem: each is checked, captured and checked again, and then all are timed in turn.

Every failure is recorded in the result.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import check, timing
from .contestants import Contestant, Outputs
from .problems import Problem, Setting

UNSTEADY = 1.5  # ratio of the slow to the fast quarter of the samples


@dataclass
class Result:
    table: str
    variant: str
    kind: str
    status: str = "error"  # "ok", "wrong", "error" or "not run"
    mode: str = "calls"  # how it was timed: "graph", or "calls" from the host
    ms: float | None = None
    low_ms: float = 0.0  # a quarter of the samples took less
    high_ms: float = 0.0  # a quarter took more
    ratio: float | None = None  # ms / ms of the unit
    more: dict[str, float] = field(default_factory=dict)  # figures of one table only
    peak_bytes: int | None = None  # memory at the peak of one step, beyond the inputs
    extra_bytes: int | None = None  # peak_bytes without the gradients, if these have their own memory
    errors: check.Errors = field(default_factory=dict)
    unsteady: bool = False  # the time or the time of the unit, or the machine was busy
    notes: list[str] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        self.status, self.notes = "not run" if isinstance(error, ImportError) else "error", [timing.reason(error)]


def measure(
    table: str, problem: Problem, contestants: Sequence[Contestant], setting: Setting, clock: timing.Clock
) -> list[Result]:
    """Measure all contestants. Memory that all of them need stays allocated."""
    torch.compiler.reset()  # functions that an earlier problem compiled would be compiled for any shape
    results, ready = [], []
    for number, contestant in enumerate(contestants, 1):
        print(f"{table}  {number}/{len(contestants)}  {contestant.name}", file=sys.stderr, flush=True)
        result = Result(table, contestant.name, contestant.kind)
        results.append(result)
        try:
            problem.use_targets(0)
            run = _prepared(problem, contestant, setting, result)
            if run is not None:
                ready.append((result, run))
        except Exception as error:
            result.fail(error)
        with contextlib.suppress(RuntimeError):  # a failure of the device, which the result reports already
            timing.collect(problem.device)
    problem.use_targets(0)
    all_samples = timing.in_turn([run for _, run in ready], problem.restore, setting.budget_ms, clock)
    for (result, _), samples in zip(ready, all_samples, strict=True):
        if isinstance(samples, Exception):
            result.fail(samples)
        else:
            _set_times(samples, setting, result)
    for result, contestant in zip(results, contestants, strict=True):
        _set_ratio(result, contestant.against or problem.unit, results)
    problem.finish(results)
    return results


def _prepared(problem: Problem, contestant: Contestant, setting: Setting, result: Result) -> Callable[[], Any] | None:
    """Check the step, measure its memory, and capture it if ``setting`` asks for graphs. None if something is wrong."""
    eager = problem.bind(contestant)
    if not _right(problem, contestant, eager, result):
        return None
    result.notes = list(filter(None, [contestant.confirm()]))
    if timing.measures_memory(problem.device):
        problem.restore()
        outputs, result.peak_bytes = timing.peak_bytes(eager, problem.device)
        owned = {tensor.untyped_storage().data_ptr() for tensor in problem.inputs}
        storages = [grad.untyped_storage() for grad in outputs.grads]
        gradients = sum(storage.nbytes() for storage in storages if storage.data_ptr() not in owned)
        result.extra_bytes = result.peak_bytes - gradients
        del outputs, storages
    if not (setting.graph and contestant.captured):
        return eager
    problem.restore()
    try:
        captured = timing.capture(eager, problem.device)
    except Exception as error:
        result.notes.append(f"timed by calls, for it cannot be captured: {timing.reason(error)}")
        return eager
    result.mode = "graph"
    # With other targets than at capture, a graph that recorded nothing, or recorded host values, gives wrong results.
    problem.use_targets(1)
    if not _right(problem, contestant, captured, result):
        result.notes.append("replayed on other targets")
        return None
    return captured


def _right(problem: Problem, contestant: Contestant, run: Callable[[], Outputs], result: Result) -> bool:
    problem.restore()
    outputs = run()
    if contestant.kind == "unit":
        return True
    result.errors = problem.check(outputs, contestant)
    wrong = check.wrong(result.errors)
    if wrong:
        result.status, result.notes = "wrong", [wrong]
    return not wrong


def _set_times(samples: list[float], setting: Setting, result: Result) -> None:
    result.low_ms, result.ms, result.high_ms = statistics.quantiles(samples, n=4, method="inclusive")
    result.status, result.unsteady = "ok", bool(setting.busy)
    if result.high_ms > UNSTEADY * result.low_ms:
        result.unsteady = True
        result.notes.append(f"unsteady: half of the samples took {result.low_ms:.4f} to {result.high_ms:.4f} ms")


def _set_ratio(result: Result, against: str, results: Sequence[Result]) -> None:
    units = [one for one in results if one.kind == "unit" and one.ms and one.variant.startswith(against)]
    if result.ms and units and result.kind != "unit":
        fastest = min(units, key=lambda one: one.ms or 0.0)
        result.ratio = result.ms / (fastest.ms or 1.0)
        result.unsteady |= fastest.unsteady
