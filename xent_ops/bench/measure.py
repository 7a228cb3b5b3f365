"""One variant on one problem: check, capture, check again, time. Whatever goes wrong is part of the result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import inductor
from . import timing
from .cases import Variant
from .problems import Problem
from .sizes import HeadShape, ModelShape, Shape


@dataclass(frozen=True)
class Settings:
    graph: bool
    memory: bool
    budget_ms: float
    interleaved: bool = False
    busy: str | None = None  # why every time is to be doubted: the machine was busy before
    wall: bool = True  # where a GPU is timed by calls: also a call in a row of calls, 55 of them and more


@dataclass
class Result:
    shape: Shape | HeadShape | ModelShape
    variant: str
    kind: str
    status: str = "error"  # "ok", "wrong" or "error"
    mode: str = "calls"  # how it was timed: "graph", or "calls" from the host
    ms: float | None = None
    low_ms: float | None = None  # a quarter of the samples took less
    high_ms: float | None = None  # a quarter took more
    copies: float | None = None
    ratio: float | None = None  # of ms (of head_ms where there are) to those of the variant it is measured against
    wall_ms: float | None = None  # by calls on a GPU: a call in a row of calls, launches included
    peak_logits: float | None = None  # peak memory beyond the inputs, in sizes of the logits
    extra_logits: float | None = None  # beyond the inputs and the gradients
    peak_mib: float | None = None  # as peak_logits, in MiB
    extra_mib: float | None = None  # as extra_logits, in MiB
    tokens_per_s: float | None = None  # of a whole training step
    head_ms: float | None = None  # of a whole training step: what it takes longer than the body alone
    loss: float | None = None  # of a whole training step
    loss_error: float | None = None
    grad_error: float | None = None
    head_error: float | None = None  # of a step: the gradient of W
    hidden_error: float | None = None  # of linear cross entropy: the gradient of the hidden states
    tolerance: float | None = None
    unsteady: list[str] = dataclasses.field(default_factory=list)  # figures (fields of this) that are to be doubted
    overwrites_input: bool = False
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


def copy_times(problem: Problem, settings: Settings) -> timing.Times:
    """Time to read and write the logits once, clocked like everything else.

    By the driver's copy, or by a kernel where that is faster: on an H200 the driver is slow from 2^30 bytes on.
    """
    source = problem.random(*problem.shape, std=3.0)
    destination = torch.empty_like(source)

    def clock(run: timing.Action) -> timing.Times:
        return _clock(timing.capture(run, problem.device) if settings.graph else run, None, problem, settings)

    ways = [lambda: destination.copy_(source), lambda: torch.neg(source, out=destination)]
    return min(map(clock, ways), key=lambda times: times.ms)


def _clock(run: timing.Action, before: timing.Action | None, problem: Problem, settings: Settings) -> timing.Times:
    clock = timing.by_events if problem.device.type == "cuda" else timing.by_wall
    return clock(run, before, settings.budget_ms, problem.device)


def measure(problem: Problem, variant: Variant, copy: timing.Times | None, settings: Settings) -> Result:
    """``copy``: times of the unit; None where there is none."""
    result, run = _prepared(problem, variant, settings)
    if run is not None:
        with _failures(result):
            before = problem.restore if result.overwrites_input else None
            _report(_clock(run, before, problem, settings), run, copy, problem, settings, result)
    run = None
    _collect(problem.device)
    return result


def measure_interleaved(
    problem: Problem, variants: Sequence[Variant], settings: Settings, step: Callable[[str], None]
) -> list[Result]:
    """All are made ready, and then timed a sample of each in turn, so that all meet the same clock rates.

    What each needs of memory stays allocated.
    """
    ready, done = [], []
    for variant in variants:
        step(variant.name)
        result, run = _prepared(problem, variant, settings)
        _collect(problem.device)
        done.append(result)
        if run is not None:
            ready.append((run, result))
    problem.use_targets(0)
    clock = timing.by_events_in_turn if problem.device.type == "cuda" else timing.by_wall_in_turn
    found = clock([run for run, _ in ready], settings.budget_ms, problem.device)
    for (run, result), times in zip(ready, found, strict=True):
        with _failures(result):
            if isinstance(times, Exception):
                raise times
            _report(times, run, None, problem, settings, result)
    return done


@contextlib.contextmanager
def _failures(result: Result) -> Iterator[None]:
    """An error is part of the result."""
    try:
        yield
    except Exception as error:
        result.status, result.note = "error", timing.reason(error)
        result.ms = result.copies = None


def _collect(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # the device's own failure, which the result tells already
        timing.collect(device)


def _prepared(problem: Problem, variant: Variant, settings: Settings) -> tuple[Result, timing.Action | None]:
    """Checked, its memory measured, and captured where that was asked for; no run where something is wrong."""
    result = Result(problem.reported_shape, variant.name, variant.kind)
    torch.compiler.reset()  # a second shape would compile for any shape, and be another contestant
    run = None
    with _failures(result):
        problem.use_targets(0)
        run = _ready(problem, variant, settings, result)
    return result, run


def _left(call: inductor.Call, variant: Variant) -> str:
    """What the pass was to replace and did not."""
    if not call.replaced:
        return f"left alone: {call.why}"
    return f"head left alone: {call.head_left or 'not found'}" if variant.head and not call.head else ""


def _ready(problem: Problem, variant: Variant, settings: Settings, result: Result) -> timing.Action | None:
    eager = problem.bind(variant)
    if not _right(problem, variant, eager, result):
        return None
    if variant.replaced:
        result.note = "; ".join(filter(None, (_left(call, variant) for call in inductor.last_report().calls)))
    run: timing.Run = eager
    result.overwrites_input = problem.overwritten()
    if result.overwrites_input and not variant.in_place:
        result.note = "; ".join(filter(None, (result.note, "overwrites the logits")))
    if settings.memory:
        problem.restore()
        memory = timing.peak_memory(eager, problem.inputs(), problem.device)
        result.peak_logits = memory.beyond_inputs / problem.unit
        result.extra_logits = memory.beyond_gradients / problem.unit
        result.peak_mib = memory.beyond_inputs / 2**20
        result.extra_mib = memory.beyond_gradients / 2**20
    if settings.graph:
        problem.restore()
        try:
            run = timing.capture(eager, problem.device)
            result.mode = "graph"
        except timing.NotCapturable as error:
            result.note = "; ".join(filter(None, (f"timed by calls, for it cannot be captured: {error}", result.note)))
    if result.mode == "graph":
        # Other targets than at capture: a graph that recorded nothing, or numbers of the host, is found out.
        problem.use_targets(1)
        if not _right(problem, variant, run, result):
            result.note = f"replayed on other targets: {result.note}"
            return None
        problem.use_targets(0)
    return run


def _report(
    times: timing.Times,
    run: timing.Action,
    copy: timing.Times | None,
    problem: Problem,
    settings: Settings,
    result: Result,
) -> None:
    result.ms, result.low_ms, result.high_ms = times
    busy = "the machine was busy" if settings.busy else "the copy was unsteady" if copy and copy.unsteady else ""
    result.note = "; ".join(filter(None, (busy, times.doubt, result.note)))
    doubted = bool(busy) or times.unsteady
    result.unsteady += ["ms"] * doubted
    if copy is not None:
        result.copies = times.ms / copy.ms
        result.unsteady += ["copies"] * doubted
    if settings.wall and problem.device.type != "cpu" and result.mode == "calls":
        wall = timing.back_to_back(run, settings.budget_ms)
        result.wall_ms = wall.ms
        result.unsteady += ["wall_ms"] * (bool(busy) or wall.unsteady)
    result.status = "ok"


def ours_failed(results: Sequence[Result]) -> bool:
    """Is one of this package wrong, or failed? Peers' failures are their own."""
    return any(result.kind == "ours" and result.status != "ok" for result in results)


def set_ratios(variants: Sequence[Variant], results: Sequence[Result]) -> None:
    """Of each result to that of the variant that it is measured against, where both have a time."""
    found = {result.variant: result for result in results}
    for variant, result in zip(variants, results, strict=True):
        other = found.get(variant.against)
        if result.ms and other and other.ms:
            result.ratio = result.ms / other.ms
            if "ms" in result.unsteady + other.unsteady:
                result.unsteady.append("ratio")


def _right(problem: Problem, variant: Variant, run: timing.Run, result: Result) -> bool:
    problem.restore()
    verdict = problem.check(run(), variant)
    result.loss_error, result.grad_error, result.tolerance = verdict.loss_error, verdict.grad_error, verdict.tolerance
    result.head_error, result.hidden_error = verdict.head_error, verdict.hidden_error
    result.loss = verdict.loss
    if not verdict.ok:
        result.status, result.note = "wrong", str(verdict)
    return verdict.ok
