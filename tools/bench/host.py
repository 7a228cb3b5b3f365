"""The host's time for an eager forward and backward."""

from __future__ import annotations

import argparse
import sys
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
from xent_ops.bench import check, run
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import Contestant, Outputs, partial
from xent_ops.bench.problems import Problem, Setting
from xent_ops.distributed import vocab_parallel_cross_entropy
from xent_ops.ops import library

HELP = (
    "host time of eager losses: our Triton launchers run on CPU tensors and a device that launches nothing, so the "
    "host does everything except the driver's work; F.cross_entropy runs on a tensor of (2, 4), where its kernels take "
    "almost no time; the process group sends nothing"
)
CLASSES = 64


class Bare(torch.autograd.Function):
    """A lower bound for a loss in Python."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty(ctx.saved_tensors[0].shape), None


class Calls(Problem):
    """Nothing is computed, so nothing is checked."""

    unit = "F.cross_entropy"

    def __init__(self, setting: Setting) -> None:
        super().__init__(Shape(64, CLASSES), setting)
        self.inputs, self.mesh = (), init_device_mesh("cpu", (2,))

    def bind(self, contestant: Contestant) -> Callable[[], Outputs]:
        loss, nothing = contestant.load(), Outputs(torch.zeros(()), ())
        shape = (2, 4) if contestant.kind == "unit" else (64, CLASSES)
        logits, target = torch.randn(shape, requires_grad=True), torch.arange(shape[0])
        if "DTensor" in contestant.name:
            logits = DTensor.from_local(logits.detach(), self.mesh, [Shard(1)], run_check=False).requires_grad_()

        def step() -> Outputs:
            torch.autograd.grad(loss(logits, target), (logits,))
            return nothing

        return step

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Errors:
        return {}


def tables(arguments: argparse.Namespace, setting: Setting) -> list[run.Table]:
    ours = xent_ops.cross_entropy
    lines: dict[str, Callable[..., Any]] = {
        "a bare autograd.Function": partial(Bare.apply),
        "xent_ops.cross_entropy": partial(ours),
        'the same, reduction="sum"': partial(ours, reduction="sum"),
        "the same, lse_square_scale=1e-4": partial(ours, lse_square_scale=1e-4),
        "the same, grad_in_forward=True": partial(ours, grad_in_forward=True),
        "vocab_parallel_cross_entropy": partial(vocab_parallel_cross_entropy, num_classes=2 * CLASSES),
        "xent_ops.cross_entropy of a DTensor": partial(ours),
    }
    known = [Contestant("F.cross_entropy", "unit", partial(F.cross_entropy))]
    known += [Contestant(name, "ours", load) for name, load in lines.items()]
    return [run.Table("a call", lambda: Calls(setting), known)]


def main(arguments: argparse.Namespace) -> int:
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
    status = run.run(arguments, tables)
    dist.destroy_process_group()
    return status
