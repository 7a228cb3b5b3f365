"""All contestants on one problem: each is checked, captured and checked again, and then all are timed in turn.

Every failure is recorded in the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import timing
from .contestants import Contestant, Outputs
from .problems import Problem


@dataclass(frozen=True)
class Settings:
    graph: bool  # in CUDA graphs
    budget_ms: float  # time to measure one contestant
    row: bool = False  # measure the wall time of a call in a row of calls
    busy: str | None = None  # why all times are unsteady: the machine was busy before the run


@dataclass
class Result:
    table: str
    variant: str
    kind: str
    status: str = "error"  # "ok", "wrong" or "error"
    mode: str = "calls"  # how it was timed: "graph", or "calls" from the host
    ms: float | None = None
    low_ms: float | None = None  # a quarter of the samples took less
    high_ms: float | None = None  # a quarter took more
    against: str = ""
    ratio: float | None = None  # ms / ms of the unit ``against``
    more: dict[str, float] = field(default_factory=dict)  # figures of one table only
    peak_bytes: int | None = None  # memory at the peak of one step, beyond the inputs
    extra_bytes: int | None = None  # peak_bytes without the gradients, if these have their own memory
    errors: dict[str, float] = field(default_factory=dict)  # relative
    limits: dict[str, float] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)  # the fields that are unsteady
    overwrites_input: bool = False
    note: str = ""

    def add_note(self, text: str) -> None:
        self.note = "; ".join(filter(None, (text, self.note)))

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def measure(
    table: str, problem: Problem, contestants: Sequence[Contestant], settings: Settings, clock: timing.Clock
) -> list[Result]:
    """Measure all contestants. Memory that all of them need stays allocated."""
    torch.compiler.reset()  # functions that an earlier problem compiled would be compiled for any shape
    results, ready = [], []
    for number, contestant in enumerate(contestants, 1):
        print(f"{table}  {number}/{len(contestants)}  {contestant.name}", file=sys.stderr, flush=True)
        result = Result(table, contestant.name, contestant.kind, against=contestant.against)
        results.append(result)
        with _failures(result):
            problem.use_targets(0)
            run = _prepared(problem, contestant, settings, result)
            if run is not None:
                ready.append((result, run, problem.restore if result.overwrites_input else None))
        with contextlib.suppress(RuntimeError):  # a failure of the device, which the result reports already
            timing.collect(problem.device)
    problem.use_targets(0)
    found = timing.in_turn([(run, before) for _, run, before in ready], settings.budget_ms, clock)
    for (result, *_), times in zip(ready, found, strict=True):
        with _failures(result):
            _report(times, settings, result)
    _set_ratios(contestants, results)
    return results


@contextlib.contextmanager
def _failures(result: Result) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        result.status, result.note = "error", timing.reason(error)


def _prepared(problem: Problem, contestant: Contestant, settings: Settings, result: Result) -> Callable[[], Any] | None:
    """Check the step, measure its memory, and capture it if ``settings`` ask for graphs. None if something is wrong."""
    eager = problem.bind(contestant)
    if not _right(problem, contestant, eager, result):
        return None
    result.note = contestant.confirm()
    result.overwrites_input = problem.overwritten()
    if timing.measures_memory(problem.device):
        problem.restore()
        outputs, result.peak_bytes = timing.peak_bytes(eager, problem.device)
        owned = {tensor.untyped_storage().data_ptr() for tensor in problem.inputs()}
        storages = [grad.untyped_storage() for grad in outputs.grads]
        gradients = sum(storage.nbytes() for storage in storages if storage.data_ptr() not in owned)
        result.extra_bytes = result.peak_bytes - gradients
        del outputs, storages
    if not (settings.graph and contestant.captured):
        return eager
    problem.restore()
    try:
        captured = timing.capture(eager, problem.device)
    except timing.NotCapturable as error:
        result.add_note(f"timed by calls, for it cannot be captured: {error}")
        return eager
    result.mode = "graph"
    # With other targets than at capture, a graph that recorded nothing, or recorded host values, gives wrong results.
    problem.use_targets(1)
    if not _right(problem, contestant, captured, result):
        result.add_note("replayed on other targets")
        return None
    return captured


def _right(problem: Problem, contestant: Contestant, run: Callable[[], Outputs], result: Result) -> bool:
    problem.restore()
    outputs = run()
    if contestant.unit:
        return True
    verdict = problem.check(outputs, contestant)
    result.errors, result.limits = verdict.errors, verdict.limits
    if not verdict.ok:
        result.status, result.note = "wrong", str(verdict)
    return verdict.ok


def _report(times: timing.Times | Exception, settings: Settings, result: Result) -> None:
    if isinstance(times, Exception):
        raise times
    result.ms, result.low_ms, result.high_ms = times
    result.add_note(times.doubt)
    if settings.busy:
        result.add_note("the machine was busy")
    if settings.busy or times.unsteady:
        result.unsteady.append("ms")
    result.status = "ok"


def _set_ratios(contestants: Sequence[Contestant], results: Sequence[Result]) -> None:
    for result in results:
        units = [
            unit
            for contestant, unit in zip(contestants, results, strict=True)
            if contestant.unit == result.against != "" and unit.ms
        ]
        if result.ms and units:
            fastest = min(units, key=lambda unit: unit.ms or 0.0)
            result.ratio = result.ms / (fastest.ms or 1.0)
            if "ms" in result.unsteady + fastest.unsteady:
                result.unsteady.append("ratio")
