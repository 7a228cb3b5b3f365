"""Speed and memory of the vocabulary-parallel loss, beside a copy of the shard and an all-gather of 12 bytes a row.

    python -m torch.distributed.run --nproc-per-node 2 -m xent_ops.bench.ranks --rows 8192 --classes 128256
    ... --linear 4096                                         # with its head, hidden states of so many features
    python -m xent_ops.bench.ranks --alone 8            # one process: a rank of 8, whose group sends nothing

Rank 0 prints its median times in milliseconds (the slowest rank sets the pace of all), the limit 1.70 copies + 1.5
all-gathers, the kernel launches of one eager step, and the peak memory beyond the logits in units of the shard. Two
more figures show what part of a step is the host's: an eager step without autograd's own thread, and one with all
threads of a rank on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..distributed.parts import share_of_rank
from ..distributed.vocab_parallel import vocab_parallel_cross_entropy
from ..functional import cross_entropy
from . import ranks_linear, timing
from .ranks_timing import milliseconds


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Run all threads of this rank on one core, so that no thread has to wake up on another one."""
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[int(os.environ["LOCAL_RANK"]) * len(cores) // int(os.environ["LOCAL_WORLD_SIZE"])]
    before = {thread: os.sched_getaffinity(thread) for thread in map(int, os.listdir("/proc/self/task"))}
    for thread in before:
        os.sched_setaffinity(thread, {mine})
    try:
        yield
    finally:
        for thread, where in before.items():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, where)


def step_of_dtensors(logits: Tensor, target: Tensor, classes: int) -> Callable[[], None]:
    """An eager step of ``xent_ops.cross_entropy`` on the same shards as a DTensor."""
    mesh = init_device_mesh(logits.device.type, (dist.get_world_size(),))
    shape = torch.Size((len(logits), classes))
    whole = DTensor.from_local(
        logits.detach(), mesh, [Shard(1)], run_check=False, shape=shape, stride=(classes, 1)
    ).requires_grad_()

    def step() -> None:
        whole.grad = None
        cross_entropy(whole, target).backward()

    return step


def launches(run: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--linear", type=int, metavar="HIDDEN", help="measure the head and the loss as one")
    chunks = "of --linear; by default as many as the library takes; of several sizes all but ours take the first"
    parser.add_argument("--chunk-rows", type=int, nargs="+", default=[None], help=chunks)
    parser.add_argument("--repeat", type=int, default=20)
    alone = "what a rank of so many takes by itself: the losses are wrong, the work and its launches are the same"
    parser.add_argument("--alone", type=int, metavar="RANKS", help=alone)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.alone is not None:
        if args.alone < 1:
            parser.error(f"--alone must be at least 1, the ranks that there would be; got {args.alone}")
        if args.linear is not None:
            parser.error("--linear checks its gradients, which no rank alone has right: leave --alone out")
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.alone)
    else:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if args.linear is not None:
        text = ranks_linear.run(args.rows, args.classes, args.linear, args.chunk_rows, args.repeat, device)
        if dist.get_rank() == 0:
            print(*text, sep="\n")
        dist.destroy_process_group()
        return
    world = dist.get_world_size()
    _, columns = share_of_rank(args.classes, dist.get_rank(), world)
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
    out.clear()
    report = {"copy of the shard": copy}
    if args.alone is None:
        gather = milliseconds(lambda: dist.all_gather_into_tensor(rows, row), device, args.repeat)
        report["all-gather of 12 bytes a row"] = gather
    report["eager"] = milliseconds(lambda: step(loss_of), device, args.repeat)
    report["eager, DTensor"] = milliseconds(step_of_dtensors(logits, target, args.classes), device, args.repeat)
    logits.grad = None
    with torch.autograd.set_multithreading_enabled(False):  # the backward runs in this thread
        report["eager, one thread"] = milliseconds(lambda: step(loss_of), device, args.repeat)
    if hasattr(os, "sched_setaffinity"):
        with one_core():
            report["eager, one core a rank"] = milliseconds(lambda: step(loss_of), device, args.repeat)
    report["compiled"] = milliseconds(lambda: step(compiled), device, args.repeat)
    if device == "cuda":
        for name, function in (("eager", loss_of), ("compiled", compiled)):
            # Held by no name: destroy_process_group waits for ever for a graph that holds NCCL's communicator.
            captured = functools.partial(timing.capture, functools.partial(step, function), logits.device)
            report[f"{name}, in a CUDA graph"] = milliseconds(captured(), device, args.repeat)
    if args.alone is None:  # else nothing is gathered, and the limit has no second term
        report["limit for eager"] = 1.70 * copy + 1.5 * gather
    text = [f"{name:30} {value:9.4f} ms" for name, value in report.items()]
    if device == "cuda":
        names = launches(lambda: step(loss_of))
        text += [f"{len(names)} launches of an eager step:", *(f"    {name[:100]}" for name in names)]
        for name, function in (("an eager", loss_of), ("a compiled", compiled)):
            logits.grad = None
            _, peak = timing.peak_bytes(functools.partial(step, function), logits.device)
            shards = f"{peak / logits.nbytes:.3f} shards"
            text.append(f"peak memory of {name} step beyond the logits, their gradient included: {shards}")
    if dist.get_rank() == 0:
        alone = "" if args.alone is None else ", one of them alone"
        print(f"{args.rows} x {args.classes} bfloat16 over {world} ranks on {device}{alone}", *text, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
