"""Clocks, CUDA graphs and peak memory. Times are medians in milliseconds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils import benchmark

ROUNDS, WARM_UP = 7, 0.8  # WARM_UP: untimed calls, as a fraction of the timed calls

Action = Callable[[], Any]
T = TypeVar("T")


def busy() -> str:
    """Describe the machine's load if it exceeds the number of cores. Call it before a run adds its own load."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"the load is {load:.1f} on {cores} cores" if load > cores else ""


def collect(device: torch.device) -> None:
    """Return freed memory to the device, so that one variant's memory does not disturb the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Before:
    """triton's do_bench goes through the tensors of ``grad_to_none`` before each timed call, outside the clock."""

    action: Action

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.action()
        return iter(())


@dataclass(frozen=True)
class Clock:
    """On CUDA a sample is one call between two events, with the L2 cleared before it; elsewhere, one call by the clock.

    With ``row`` a sample is the wall time of a call in a row of calls: launches are included, and nothing is cleared.
    """

    device: torch.device
    row: bool = False

    def agree(self, ms: float) -> float:
        """The estimate that sets the number of calls in a row."""
        return ms

    def block(self, run: Action, before: Action, ms: float) -> list[float]:
        """Samples of a long block of calls, after calls that are not timed. ``before`` runs outside the clock."""
        if self.device.type == "cuda" and not self.row:
            from triton.testing import do_bench

            samples: list[float] = do_bench(run, WARM_UP * ms, ms, _Before(before), return_mode="all")
            return samples
        functions = {"run": run, "before": before}
        timer = benchmark.Timer("run()", "before()", globals=functions, num_threads=torch.get_num_threads())
        calls = max(2, math.ceil(ms / self.agree(1e3 * timer.timeit(1).mean)))
        if not self.row:  # a timer runs ``before`` once, whatever the number of calls
            return [1e3 * timer.timeit(1).mean for _ in range(calls)]
        for _ in range(int(WARM_UP * calls)):
            run()
        return [1e3 * timer.timeit(calls).mean]


def in_turn(runs: Sequence[Action], before: Action, budget_ms: float, clock: Clock) -> list[list[float] | Exception]:
    """Samples of all runs, from rounds of long blocks in random order. A run that raises gives its error.

    In a fixed order a run after a lighter one is up to 6 % faster on an H100 at its power limit (2026-11-26). A long
    block lets the GPU reach the run's own clocks and power.
    """
    samples: list[list[float]] = [[] for _ in runs]
    errors: dict[int, Exception] = {}
    order = random.Random(0)
    for _ in range(ROUNDS):
        for index in order.sample(range(len(runs)), len(runs)):
            if index not in errors:
                try:
                    samples[index] += clock.block(runs[index], before, budget_ms / ROUNDS)
                except Exception as error:
                    errors[index] = error
    return [errors.get(index, found) for index, found in enumerate(samples)]


def reason(error: BaseException) -> str:
    """The error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def capture(run: Action, device: torch.device) -> Action:
    """``run`` as a CUDA graph, whose replay returns the same outputs each time. An error says why there is none.

    torch's debug mode finds synchronisation first. A failed capture would leave the allocator and the random generator
    of the process in the capturing state, and would disturb the next measurement.
    """
    mode, current, side = torch.cuda.get_sync_debug_mode(), torch.cuda.current_stream(device), torch.cuda.Stream(device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize(device)
    with torch.cuda.stream(side):  # first launches load modules, which a capture forbids
        for _ in range(3):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            outputs = run()
    except Exception as error:
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        raise first from None
    finally:
        torch.cuda.set_stream(current)  # torch.cuda.graph does not, when ending the capture raises
    torch.cuda.synchronize(device)

    def replay(kept: Action = run) -> Any:  # ``kept``, because the graph reads the memory of tensors that it holds
        graph.replay()
        return outputs

    return replay


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
