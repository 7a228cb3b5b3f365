"""Clocks, CUDA graphs and peak memory. Times are medians in milliseconds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import benchmark

from .outputs import Run

L2_FLUSH_BYTES = 256 << 20  # as triton.testing.do_bench: several times any GPU's L2
MIN_SAMPLES, MAX_SAMPLES = 10, 1000
UNSTEADY = 1.5  # between the slow and the fast quarter of the samples

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
    """What else the machine does now, where that is more than it has cores for; before a run adds its own load."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"the load is {load:.1f} on {cores} cores" if load > cores else None


class NotCapturable(Exception):
    """With the reason why no CUDA graph can hold it."""


def reason(error: BaseException) -> str:
    """One line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def collect(device: torch.device) -> None:
    """Give freed memory back, so that one variant's leftovers are not in another's way."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _samples(estimate_ms: float, budget_ms: float) -> int:
    return max(MIN_SAMPLES, min(MAX_SAMPLES, int(budget_ms / max(estimate_ms, 1e-3))))


def _event_pair(run: Action, before: Action | None, flush: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Around a call that finds nothing in the L2."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if before:
        before()
    flush.zero_()
    start.record()
    run()
    end.record()
    return start, end


def by_events(run: Action, before: Action | None, budget_ms: float, device: torch.device) -> Times:
    """On the GPU's own clock, the L2 flushed and ``before`` called between the samples."""
    flush = torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def measure(count: int) -> Times:
        pairs = [_event_pair(run, before, flush) for _ in range(count)]
        torch.cuda.synchronize(device)
        return Times.of([start.elapsed_time(end) for start, end in pairs])

    measure(3)  # warms up
    return measure(_samples(measure(5).ms, budget_ms))


def by_events_in_turn(runs: Sequence[Action], budget_ms: float, device: torch.device) -> list[Times | Exception]:
    """As ``by_events``, a sample of each in turn."""
    flush = torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def rounds(alive: Sequence[Action], count: int) -> list[list[float]]:
        pairs = [[_event_pair(run, None, flush) for run in alive] for _ in range(count)]
        torch.cuda.synchronize(device)
        return [[start.elapsed_time(end) for start, end in of_run] for of_run in zip(*pairs, strict=True)]

    return _in_turn(runs, rounds, budget_ms)


def by_wall_in_turn(runs: Sequence[Action], budget_ms: float, device: torch.device) -> list[Times | Exception]:
    """As ``by_wall``, a call of each in turn."""

    def rounds(alive: Sequence[Action], count: int) -> list[list[float]]:
        samples = [[_wall_ms(run, device) for run in alive] for _ in range(count)]
        return [list(of_run) for of_run in zip(*samples, strict=True)]

    return _in_turn(runs, rounds, budget_ms)


def _in_turn(
    runs: Sequence[Action], rounds: Callable[[Sequence[Action], int], list[list[float]]], budget_ms: float
) -> list[Times | Exception]:
    """As many samples of each as the budgets of all have room for; of one that raises, the error."""
    found: list[Any] = []
    for run in runs:
        try:
            rounds([run], 3)  # warms up, and compiles again what a reset has dropped
            found.append(run)
        except Exception as error:
            found.append(error)
    alive = [run for run in found if not isinstance(run, Exception)]
    if not alive:
        return found
    mean = statistics.mean(statistics.median(samples) for samples in rounds(alive, 3))
    times = iter([Times.of(samples) for samples in rounds(alive, _samples(mean, budget_ms))])
    return [run if isinstance(run, Exception) else next(times) for run in found]


def by_wall(run: Action, before: Action | None, budget_ms: float, device: torch.device) -> Times:
    """On the host's clock; nothing is flushed. With ``before``, for which torch's timer has no place, call by call."""
    if before is None:
        return _by_torch(run, budget_ms)

    def sample() -> float:
        before()
        return _wall_ms(run, device)

    sample()
    estimate = statistics.median(sample() for _ in range(3))
    return Times.of([sample() for _ in range(_samples(estimate, budget_ms))])


def _wall_ms(run: Action, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _timer(run: Action) -> benchmark.Timer:
    """It waits for the device before it reads the clock, and without num_threads it would take one thread."""
    return benchmark.Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())


def _by_torch(run: Action, budget_ms: float) -> Times:
    timer = _timer(run)
    least = max(budget_ms / 1e3, MIN_SAMPLES * timer.timeit(1).mean)
    samples: list[float] = []  # each of a block of calls, as long as the clock needs
    while len(samples) < MIN_SAMPLES:
        samples += timer.blocked_autorange(min_run_time=least).times
    return Times.of([1e3 * sample for sample in samples])


def back_to_back(run: Action, budget_ms: float) -> Times:
    """Wall time a call in a row of calls: what an eager loop on the host pays, launches included."""
    timer = _timer(run)
    count = _samples(1e3 * timer.timeit(5).mean, budget_ms / 5)
    return Times.of([1e3 * timer.timeit(count).mean for _ in range(5)])


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
    run: Action  # kept, for the graph reads the memory of tensors that it holds

    def __call__(self) -> Any:
        self.graph.replay()
        return self.outputs


def capture(run: Action, device: torch.device) -> Captured:
    """``run`` as a CUDA graph.

    What synchronises is found by torch's debug mode first: a capture that fails leaves the allocator and the random
    generator of the process in a state of capturing, and whatever is measured next would suffer.
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


@dataclass(frozen=True)
class Memory:
    beyond_inputs: int  # bytes at the peak of one forward and backward
    beyond_gradients: int  # less those of the gradients, where they have memory of their own


_CLEAR_REFS = "/proc/self/clear_refs"


def measures_memory(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and os.access(_CLEAR_REFS, os.W_OK))


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def peak_bytes(run: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """Of a call that has run before: what CUDA's allocator gave, or on the CPU what the process held of memory, beyond
    what it was before."""
    collect(device)
    if device.type == "cpu":
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)  # else a tensor that lies in freed memory would count as nothing
        Path(_CLEAR_REFS).write_text("5")  # the peak begins anew
        base = _resident("VmRSS")
        outputs = run()
        return outputs, _resident("VmHWM") - base
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    outputs = run()
    torch.cuda.synchronize(device)
    return outputs, torch.cuda.max_memory_allocated(device) - base


def peak_memory(run: Run, inputs: tuple[torch.Tensor, ...], device: torch.device) -> Memory:
    """Of a step of a problem, with and without its gradients."""
    outputs, peak = peak_bytes(run, device)
    owned = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    storages = [grad.untyped_storage() for grad in outputs.grads]
    gradients = sum(storage.nbytes() for storage in storages if storage.data_ptr() not in owned)
    return Memory(peak, peak - gradients)
