"""Speed and memory of the vocabulary-parallel loss, beside a copy of the shard and an all-gather of 12 bytes a row.

    python -m torch.distributed.run --nproc-per-node 2 -m xent_ops.distributed.bench --rows 8192 --classes 128256

Prints, of rank 0: milliseconds (medians; the slowest rank sets the pace of all), the limit 1.70 copies + 1.5
all-gathers, kernel launches of one eager step, and the peak memory beyond the logits in units of the shard.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .vocab_parallel import chunk, vocab_parallel_cross_entropy


def milliseconds(run: Callable[[], object], device: str, repeat: int) -> float:
    for _ in range(10):
        run()
    times = []
    for _ in range(repeat):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The host runs ahead of the device, as in training: what is measured is not the first launch's way there.
            torch.cuda._sleep(1_000_000)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def launches(run: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--repeat", type=int, default=50)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    _, columns = chunk(args.classes, dist.get_rank(), world)
    torch.manual_seed(0)
    target = torch.randint(0, args.classes, (args.rows,), device=device)
    logits = torch.randn(args.rows, columns, device=device, dtype=torch.bfloat16).requires_grad_()

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(x, t, num_classes=args.classes)

    compiled = torch.compile(loss_of, fullgraph=True)

    def step(function: Callable[[Tensor, Tensor], Tensor]) -> None:
        logits.grad = None
        function(logits, target).backward()

    out: list[Tensor] = [torch.empty_like(logits)]
    row = torch.zeros(3 * args.rows, device=device)
    rows = torch.zeros(world * row.numel(), device=device)
    with torch.no_grad():
        copy = milliseconds(lambda: out[0].copy_(logits), device, args.repeat)
    gather = milliseconds(lambda: dist.all_gather_into_tensor(rows, row), device, args.repeat)
    out.clear()
    report = {"copy of the shard": copy, "all-gather of 12 bytes a row": gather}
    report["eager"] = milliseconds(lambda: step(loss_of), device, args.repeat)
    report["compiled"] = milliseconds(lambda: step(compiled), device, args.repeat)
    report["limit for eager"] = 1.70 * copy + 1.5 * gather
    text = [f"{name:30} {value:9.4f} ms" for name, value in report.items()]
    if device == "cuda":
        names = launches(lambda: step(loss_of))
        text += [f"{len(names)} launches of an eager step:", *(f"    {name[:100]}" for name in names)]
        logits.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss_of)
        peak = (torch.cuda.max_memory_allocated() - before) / (logits.numel() * logits.element_size())
        text.append(f"peak memory of an eager step beyond the logits: {peak:.3f} shards")
    if dist.get_rank() == 0:
        print(f"{args.rows} x {args.classes} bfloat16 over {world} ranks on {device}", *text, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
