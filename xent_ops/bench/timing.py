"""Clocks, CUDA graphs and peak memory. Times are medians in milliseconds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

L2_FLUSH_BYTES = 256 << 20  # as triton.testing.do_bench: several times any GPU's L2
ROUNDS, WARM_UP = 7, 0.8  # WARM_UP: untimed calls, as a fraction of the timed calls
LEAST_CALLS, MOST_CALLS = 2, 1000  # timed calls in a block
UNSTEADY = 1.5  # ratio of the slow to the fast quarter of the samples

Action = Callable[[], Any]
T = TypeVar("T")


class Times(NamedTuple):
    ms: float  # the median
    low: float  # a quarter of the samples took less
    high: float  # a quarter took more

    @staticmethod
    def of(samples: list[float]) -> Times:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Times(median, low, high)

    @property
    def unsteady(self) -> bool:
        return self.high > UNSTEADY * self.low

    @property
    def doubt(self) -> str:
        if not self.unsteady:
            return ""
        return f"unsteady: half of the samples took {self.low:.4f} to {self.high:.4f} ms (is the device busy?)"


def busy() -> str | None:
    """Describe the machine's load if it exceeds the number of cores. Call it before a run adds its own load."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"the load is {load:.1f} on {cores} cores" if load > cores else None


class NotCapturable(Exception):
    """Its message says why no CUDA graph can hold the call."""


def reason(error: BaseException) -> str:
    """The error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def collect(device: torch.device) -> None:
    """Return freed memory to the device, so that one variant's memory does not disturb the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _repeat(run: Action, count: int) -> None:
    """Drop each result at once: gradients of hundreds of calls would fill the device."""
    for _ in range(count):
        run()


class Clock:
    """CUDA events on a GPU, with the L2 flushed between calls; elsewhere the host's clock.

    With ``row`` a sample is the wall time of a call in a row of calls, with launches and without flushes: the cost of
    an eager loop on the host.
    """

    def __init__(self, device: torch.device, row: bool = False) -> None:
        self.device, self.row = device, row
        self._flush: torch.Tensor | None = None
        if device.type == "cuda" and not row:
            self._flush = torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def agree(self, ms: float) -> float:
        """The estimate that sets the number of calls."""
        return ms

    def block(self, run: Action, before: Action | None, count: int) -> list[float]:
        """Time ``count`` calls. ``before`` runs before each, untimed. Returns each time, or the mean of a row."""
        if self.row:
            return [self._wall(lambda: _repeat(run, count)) / count]
        if self._flush is None:
            return [self._wall(run, before) for _ in range(count)]
        pairs = [self._events(run, before, self._flush) for _ in range(count)]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in pairs]

    def _events(
        self, run: Action, before: Action | None, flush: torch.Tensor
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if before:
            before()
        flush.zero_()
        start.record()
        run()
        end.record()
        return start, end

    def _wall(self, run: Action, before: Action | None = None) -> float:
        if before:
            before()
        synchronize(self.device)
        start = time.perf_counter()
        run()
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - start)


def in_turn(runs: Sequence[tuple[Action, Action | None]], budget_ms: float, clock: Clock) -> list[Times | Exception]:
    """Time all runs in rounds of long blocks, in random order. Untimed calls before each block let the GPU reach the
    run's own clocks and power. A run that raises gives its error.

    In a fixed order a run after a lighter one is up to 6 % faster on an H100 at its power limit (2026-11-26).
    """
    counts, samples = [0] * len(runs), [list[float]() for _ in runs]
    errors: dict[int, Exception] = {}
    order = random.Random(0)
    for number in range(-1, ROUNDS):
        alive = [index for index in range(len(runs)) if index not in errors]
        order.shuffle(alive)
        for index in alive:
            run, before = runs[index]
            try:
                if number < 0:
                    clock.block(run, before, 3)
                    ms = clock.agree(statistics.median(clock.block(run, before, 3)))
                    counts[index] = max(LEAST_CALLS, min(MOST_CALLS, math.ceil(budget_ms / ROUNDS / max(ms, 1e-3))))
                    continue
                clock.block(run, before, math.ceil(WARM_UP * counts[index]))
                samples[index] += clock.block(run, before, counts[index])
            except Exception as error:
                errors[index] = error
    return [errors[index] if index in errors else Times.of(samples[index]) for index in range(len(runs))]


@contextlib.contextmanager
def _synchronising_is_an_error() -> Iterator[None]:
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(previous)


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    outputs: Any  # overwritten by each replay
    run: Action  # kept, because the graph reads the memory of tensors that it holds

    def __call__(self) -> Any:
        self.graph.replay()
        return self.outputs


def capture(run: Action, device: torch.device) -> Captured:
    """``run`` as a CUDA graph.

    torch's debug mode finds synchronisation first. A failed capture would leave the allocator and the random generator
    of the process in the capturing state, and would disturb the next measurement.
    """
    try:
        with _synchronising_is_an_error():
            run()
    except Exception as error:
        raise NotCapturable(f"synchronises ({reason(error)})") from error
    finally:
        torch.cuda.synchronize(device)
    current = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):  # first launches load modules, which a capture forbids
        for _ in range(3):
            run()
    current.wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            outputs = run()
    except Exception as error:
        torch.cuda.set_stream(current)  # torch.cuda.graph does not, when ending the capture raises
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        raise NotCapturable(reason(first)) from error
    torch.cuda.synchronize(device)
    return Captured(graph, outputs, run)


_CLEAR_REFS = "/proc/self/clear_refs"


def measures_memory(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and os.access(_CLEAR_REFS, os.W_OK))


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def peak_bytes(run: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """Run a call that has run before. Returns its result and its peak memory beyond the memory before it: CUDA's
    allocator counts it, or on the CPU the process."""
    collect(device)
    if device.type == "cpu":
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)  # or a tensor in freed memory would not count
        Path(_CLEAR_REFS).write_text("5")  # resets the peak
        base = _resident("VmRSS")
        outputs = run()
        return outputs, _resident("VmHWM") - base
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    outputs = run()
    torch.cuda.synchronize(device)
    return outputs, torch.cuda.max_memory_allocated(device) - base
