"""Scratch: where the time of the pipelined loss goes, with the sum of the input's gradient in several places.

    python -m torch.distributed.run --nproc-per-node 2 tools/ranks_overlap.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xent_ops.distributed import bench_linear, pipelined, vocab_parallel_cross_entropy

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
begin_sum, begin_gather, wait = pipelined._begin_sum, pipelined._begin_gather, pipelined._wait


def restore():
    pipelined._begin_sum, pipelined._begin_gather, pipelined._wait = begin_sum, begin_gather, wait


def at_once():
    pipelined._begin_sum = lambda g, ranks, s: wait(begin_sum(g, ranks, s), ranks)
    pipelined._wait = lambda t, ranks: t if t.dtype == torch.bfloat16 else wait(t, ranks)


def no_sum():
    pipelined._begin_sum = lambda g, ranks, s: g
    pipelined._wait = lambda t, ranks: t if t.dtype == torch.bfloat16 else wait(t, ranks)


def no_communication():
    pipelined._begin_sum = lambda g, ranks, s: g
    pipelined._begin_gather = lambda stats, ranks: torch.cat([stats, stats])
    pipelined._wait = lambda t, ranks: t


def unfused(problem):
    def step():
        loss = vocab_parallel_cross_entropy(
            F.linear(problem.input, problem.head), problem.target, num_classes=problem.classes, )
        grads = torch.autograd.grad(loss, (problem.input, problem.head))
        dist.all_reduce(grads[0])
        return loss.detach(), *grads
    return step


def profiled(step, name):
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    if rank == 0:
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        events.sort(key=lambda e: e.time_range.start)
        first = events[0].time_range.start
        print(f"--- {name}: kernel, start us, took us", flush=True)
        for e in events:
            if e.time_range.elapsed_us() > 3:
                print(f"{e.name[:60]:60} {e.time_range.start - first:9.0f} {e.time_range.elapsed_us():8.0f}", flush=True)


SHAPES = [(8192, 4096, 128256, (2048, 8192)), (8192, 4096, 32064, (2048, 4096, 8192)), (8192, 4096, 64128, (2048, 4096, 8192))]
if not on_gpu:
    SHAPES = [(64, 16, 101, (32, 64))]
for number, (rows, hidden, classes, sizes) in enumerate(SHAPES):
    problem = bench_linear._problem(rows, classes, hidden, None, device)
    units = bench_linear._units(problem, device, 10)
    if rank == 0:
        print(rows, hidden, classes, {k: round(v, 3) for k, v in units.items()}, flush=True)
    cases = [(None, 0)] + [(how, size) for size in sizes for how in (restore, at_once, no_sum, no_communication)]
    if number > 0:
        cases = [(None, 0)] + [(restore, size) for size in sizes]
    for how, size in cases:
        restore()
        if how is None:
            step, name = unfused(problem), "unfused eager"
        else:
            how()
            step, name = bench_linear._ours(problem._replace(chunk_rows=size)), f"{how.__name__} {size}"
        step()
        time = bench_linear._time(step, device, 10)
        if rank == 0:
            print(f"{name:30} {time:8.3f} ms {time / sum(list(units.values())[:3]):6.3f}", flush=True)
        if on_gpu and number == 0 and how in (None, restore):
            profiled(step, name)
dist.destroy_process_group()
