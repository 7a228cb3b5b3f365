"""Host time of eager forward + backward of a loss: python tools/eager_overhead.py

Our Triton launchers run on CPU tensors and a device that launches nothing (no_device.py), so the host does everything
except the driver's work. F.cross_entropy runs on a tensor of (2, 4), where its own kernels take almost no time. The
process group of the vocabulary-parallel loss communicates nothing. Prints microseconds of a forward and backward, each
the best of 200 batches, taken in turns.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from no_device import Driver
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.runtime import driver

import xent_ops
from xent_ops.distributed import vocab_parallel_cross_entropy
from xent_ops.ops import library

BATCHES, CALLS, CLASSES = 200, 10, 64


class Bare(torch.autograd.Function):
    """A lower bound for a loss in Python."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty(ctx.saved_tensors[0].shape), None


def parallel(logits: Tensor, target: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(logits, target, num_classes=2 * CLASSES)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "F.cross_entropy": F.cross_entropy,
    "a bare autograd.Function": Bare.apply,
    "xent_ops.cross_entropy": xent_ops.cross_entropy,
    'the same, reduction="sum"': lambda x, t: xent_ops.cross_entropy(x, t, reduction="sum"),
    "the same, lse_square_scale=1e-4": lambda x, t: xent_ops.cross_entropy(x, t, lse_square_scale=1e-4),
    "the same, grad_in_forward=True": lambda x, t: xent_ops.cross_entropy(x, t, grad_in_forward=True),
    "vocab_parallel_cross_entropy": parallel,
    "xent_ops.cross_entropy of a DTensor": xent_ops.cross_entropy,
}


def main() -> None:
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
        steps[name] = lambda loss=loss, x=logits, t=target: torch.autograd.grad(loss(x, t), (x,))
        for _ in range(100):
            steps[name]()
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(BATCHES):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                step()
            best[name] = min(best[name], time.perf_counter() - start)
    for name, seconds in best.items():
        print(f"{name:40} {1e6 * seconds / CALLS:6.1f} us {seconds / best['F.cross_entropy']:6.2f} x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
