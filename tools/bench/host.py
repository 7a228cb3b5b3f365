"""The host's time for an eager forward and backward."""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import xent_ops
from xent_ops.distributed import vocab_parallel_cross_entropy
from xent_ops.ops import library

HELP = (
    "host time of eager losses: our Triton launchers run on CPU tensors and a device that launches nothing, so the "
    "host does everything except the driver's work; F.cross_entropy runs on a tensor of (2, 4), where its kernels take "
    "almost no time; the process group sends nothing; the least of 200 blocks, taken in turns"
)
BLOCKS, CALLS, CLASSES = 200, 10, 64


class Bare(torch.autograd.Function):
    """A lower bound for a loss in Python."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty(ctx.saved_tensors[0].shape), None


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "F.cross_entropy": F.cross_entropy,
    "a bare autograd.Function": Bare.apply,
    "xent_ops.cross_entropy": xent_ops.cross_entropy,
    'the same, reduction="sum"': lambda x, t: xent_ops.cross_entropy(x, t, reduction="sum"),
    "the same, lse_square_scale=1e-4": lambda x, t: xent_ops.cross_entropy(x, t, lse_square_scale=1e-4),
    "the same, grad_in_forward=True": lambda x, t: xent_ops.cross_entropy(x, t, grad_in_forward=True),
    "vocab_parallel_cross_entropy": lambda x, t: vocab_parallel_cross_entropy(x, t, num_classes=2 * CLASSES),
    "xent_ops.cross_entropy of a DTensor": xent_ops.cross_entropy,
}


def step_of(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(logits, target), (logits,))


def run(arguments: argparse.Namespace) -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from triton.runtime import driver

    sys.path.append(str(Path(__file__).parents[1]))
    from no_device import Driver

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    driver.set_active(Driver())
    overrides = torch.library.Library("xent", "IMPL")
    for name, operator in library.OPERATORS.items():
        overrides.impl(name, operator.on_triton, "CPU", allow_override=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    steps: dict[str, Callable[[], Any]] = {}
    for name, loss in LOSSES.items():
        shape = (2, 4) if loss is F.cross_entropy else (64, CLASSES)
        logits, target = torch.randn(shape, requires_grad=True), torch.arange(shape[0])
        if "DTensor" in name:
            logits = DTensor.from_local(logits.detach(), mesh, [Shard(1)], run_check=False).requires_grad_()
        steps[name] = functools.partial(step_of, loss, logits, target)
        for _ in range(100):
            steps[name]()
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(BLOCKS):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                step()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS)
    for name, seconds in best.items():
        print(f"{name:40} {1e6 * seconds:6.1f} us {seconds / best['F.cross_entropy']:6.2f} x")
    dist.destroy_process_group()
    return 0
