"""Times of what all ranks run together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

# Calls in a sample, back to back as in a training loop, so that the host runs ahead of the device if it can. On a CPU
# there is no device to run ahead of, and a call takes seconds.
CALLS = {"cuda": 50, "cpu": 1}


def milliseconds(run: Callable[[], object], device: str, repeat: int, calls: int | None = None) -> float:
    """The time of one call: the median of ``repeat`` samples of ``calls`` calls, begun together by all ranks."""
    calls = calls or CALLS[device]
    for _ in range(calls):
        run()
    times = []
    for _ in range(repeat):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / calls)
        else:
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times.append(1e3 * (time.perf_counter() - start) / calls)
    return statistics.median(times)
