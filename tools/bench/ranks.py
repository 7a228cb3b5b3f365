"""A vocabulary split over ranks: the loss of logits, and the head and the loss.

    python -m torch.distributed.run --nproc-per-node 2 -m tools.bench ranks --shapes 8192x128256
    python -m torch.distributed.run --nproc-per-node 2 -m tools.bench ranks-heads --hidden 4096
    python -m tools.bench ranks --alone 8      # one process: a rank of 8, whose group sends nothing

Rank 0 prints. A sample is a row of calls that all ranks begin together. The unit of heads is the work that every way
needs: the three matmuls of this rank's classes, one all-reduce of the input's gradient, one all-gather of 12 bytes a
row.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import xent_ops
from xent_ops import distributed, linear_cross_entropy
from xent_ops.bench import check, run, timing
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import Contestant, Function, Outputs, compiled, copies, partial, products, unit
from xent_ops.bench.problems import Head, Loss, Problem, Setting
from xent_ops.distributed import vocab_parallel_cross_entropy
from xent_ops.distributed.parts import share_of_rank
from xent_ops.head.sizes import rows_of_chunk

NECESSARY = "products and collectives"
TOLERANCE = 2e-2  # for bfloat16 gradients, relative in the 2-norm


class Clock(timing.Clock):
    """Times a row of calls that all ranks begin together. The host can run ahead of the device."""

    def agree(self, ms: float) -> float:
        return worst_of_ranks([ms], self.device)[0]

    def block(self, run: timing.Action, before: timing.Action, ms: float) -> list[float]:
        return super().block(run, lambda: (before(), dist.barrier()), ms)


def worst_of_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    found = torch.tensor(values, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def main(arguments: argparse.Namespace) -> int:
    if arguments.alone:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=arguments.alone)
    else:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            arguments.device = f"cuda:{os.environ['LOCAL_RANK']}"
    with contextlib.ExitStack() as stack:
        if dist.get_rank() > 0:
            arguments.json = arguments.plot = arguments.compare = None
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        status = run.run(arguments, arguments.tables, lambda device, _: Clock(device, row=True))
    # destroy_process_group waits forever for a CUDA graph that holds NCCL's communicator. So no graph may be left.
    torch.compiler.reset()
    timing.collect(torch.device(arguments.device or "cpu"))
    dist.destroy_process_group()
    return status


class Split(Problem):
    """All ranks have the same tensors, and each uses its classes. A contestant that fails on one rank is not timed."""

    def classes(self) -> slice:
        start, size = share_of_rank(self.shape.classes, dist.get_rank(), dist.get_world_size())
        return slice(start, start + size)

    def bind(self, contestant: Contestant) -> Callable[[], Outputs]:
        error: Exception | None = None
        try:
            step = super().bind(contestant)
            step()  # compiles
        except Exception as raised:
            error = raised
        if worst_of_ranks([float(error is not None)], self.device)[0]:
            raise error or RuntimeError("it failed on another rank")
        return step

    def errors(self, outputs: Outputs, loss: Tensor, **grads: Tensor) -> check.Errors:
        """The largest errors over all ranks."""
        found = [check.loss_error(outputs.loss, loss), *map(check.norm_error, outputs.grads, grads.values())]
        worst = worst_of_ranks(found, self.device)
        return {name: (error, TOLERANCE) for name, error in zip(("loss", *grads), worst, strict=True)}


class SplitLoss(Split, Loss):
    def __init__(self, alone: bool, shape: Shape, setting: Setting) -> None:
        super().__init__(shape, setting)
        self.alone = alone
        self.whole, self.source = self.source, self.source[:, self.classes()].contiguous()
        self.logits = self.source.clone()
        self.inputs, self.others = (self.logits,), (self.target, shape.classes)
        self.memory_unit = (self.logits.nbytes, "shards")

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Errors:
        if self.alone:  # nothing is gathered, and the losses are wrong
            return {}
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        grad = torch.empty(self.source.shape, dtype=torch.float64, device=self.device)
        for part in check.chunks(*self.shape, self.device):
            value, logits_grad = self.expected_rows(self.whole[part], part, contestant.options)
            total += value
            grad[part] = logits_grad[:, self.classes()]
        return self.errors(outputs, total, gradient=grad)


class SplitHead(Split, Head):
    unit = NECESSARY

    def __init__(self, shape: Shape, hidden: int, setting: Setting) -> None:
        super().__init__(shape, hidden, setting)
        self.part = self.matrix[self.classes()].clone()
        self.own_rows, self.others = self.rows_of_rank(self.hidden).clone(), (self.target, shape.classes)

    def rows_of_rank(self, rows: Tensor) -> Tensor:
        """This rank's part of the sequence."""
        return rows.chunk(dist.get_world_size())[dist.get_rank()]

    def bind(self, contestant: Contestant) -> Callable[[], Outputs]:
        self.inputs = (self.own_rows if "sequence parallel" in contestant.name else self.hidden, self.part)
        return super().bind(contestant)

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Errors:
        loss, hidden, matrix = self.expected(contestant.options)
        if "sequence parallel" in contestant.name:
            hidden = self.rows_of_rank(hidden)
        return self.errors(outputs, loss, dH=hidden, dW=matrix[self.classes()])


def as_dtensor(local: Tensor, placement: Shard | Replicate, *shape: int) -> Any:
    mesh = init_device_mesh(local.device.type, (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def split_loss(logits: Tensor, target: Tensor, classes: int) -> Tensor:
    return vocab_parallel_cross_entropy(logits, target, num_classes=classes)


def one_thread(logits: Tensor, target: Tensor, classes: int) -> Outputs:
    with torch.autograd.set_multithreading_enabled(False):
        value = split_loss(logits, target, classes)
        return Outputs(value.detach(), torch.autograd.grad(value, (logits,)))


def dtensor_loss() -> Function:
    """An eager step of ``xent_ops.cross_entropy`` on the same shards as a DTensor."""
    whole = functools.cache(lambda x, classes: as_dtensor(x.detach(), Shard(1), len(x), classes).requires_grad_())

    def step(logits: Tensor, target: Tensor, classes: int) -> Outputs:
        loss = xent_ops.cross_entropy(whole(logits, classes), target)
        grad: Any = torch.autograd.grad(loss, [whole(logits, classes)])[0]
        value = loss.detach()
        return Outputs(value.to_local() if isinstance(value, DTensor) else value, (grad.to_local(),))

    return step


def losses(arguments: argparse.Namespace, setting: Setting) -> list[run.Table]:
    """Steps of the loss. CUDA graphs, and steps without autograd's own thread, show the host's part of the time."""
    eager = Contestant("eager", "ours", partial(split_loss), captured=False)
    whole = Contestant("compiled", "ours", compiled(partial(split_loss)), captured=False)
    known = [
        *copies(),
        unit("all-gather of 12 bytes a row", lambda: gather_statistics),
        eager,
        replace(eager, name="eager, DTensor", load=dtensor_loss),
        replace(eager, name="eager, one thread", load=partial(one_thread)),
        whole,
    ]
    if setting.device.type == "cuda":
        known += [replace(one, name=f"{one.name}, in a CUDA graph", captured=True) for one in (eager, whole)]
    problem = functools.partial(SplitLoss, bool(arguments.alone))
    return run.tables_of(problem, arguments.shapes, (), known, setting)


@functools.cache
def _statistics(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(3 * rows * dist.get_world_size(), device=device), torch.zeros(3 * rows, device=device)


def gather_statistics(rows: Tensor, *_: Any) -> None:
    dist.all_gather_into_tensor(*_statistics(len(rows), rows.device))


def split_head(hidden: Tensor, part: Tensor, target: Tensor, classes: int, **options: Any) -> Tensor:
    place = {name: options.pop(name) for name in ("pipelined", "sequence_parallel") if name in options}
    return linear_cross_entropy(hidden, part, target, shard=distributed.Shard(classes, **place), **options)


def all_logits() -> Function:
    """A compiled step with all local logits. After the backward comes the all-reduce of a tensor-parallel layer."""
    loss = compiled(lambda: lambda x, w, t, classes: split_loss(F.linear(x, w), t, classes))()

    def step(hidden: Tensor, part: Tensor, target: Tensor, classes: int) -> Outputs:
        value = loss(hidden, part, target, classes)
        grads = torch.autograd.grad(value, (hidden, part))
        dist.all_reduce(grads[0])
        return Outputs(value.detach(), grads)

    return step


def torch_loss_parallel(hidden: Tensor, part: Tensor, target: Tensor, classes: int) -> Outputs:
    x = as_dtensor(hidden, Replicate(), *hidden.shape)
    w = as_dtensor(part, Shard(0), classes, part.shape[1])
    with loss_parallel():
        loss: Any = F.cross_entropy(F.linear(x, w).float(), target)
        grads = torch.autograd.grad(loss, (hidden, part))
    return Outputs(loss.detach().full_tensor(), grads)


def units(chunk_rows: int | None) -> list[Contestant]:
    """The work that every step needs, together and by parts."""

    def reduce(hidden: Tensor, *_: Any) -> None:
        dist.all_reduce(torch.zeros_like(hidden))

    def by_chunks(hidden: Tensor, part: Tensor, *_: Any) -> None:
        total = torch.empty_like(part)
        rows = rows_of_chunk(len(hidden), hidden, len(part), False, chunk_rows)
        for number, x in enumerate(hidden.split(rows)):
            logits = torch.mm(x, part.t())
            torch.mm(logits, part)
            torch.addmm(total, logits.t(), x, beta=float(number > 0), out=total)

    def necessary(hidden: Tensor, part: Tensor, *_: Any) -> tuple[Tensor, ...]:
        grads = products(hidden, part)
        reduce(hidden)
        gather_statistics(hidden)
        return grads

    return [
        unit(NECESSARY, lambda: necessary),
        unit("three local products", lambda: products),
        unit("the products by chunks", lambda: by_chunks),
        unit("all-reduce of the input's gradient", lambda: reduce),
        unit("all-gather of 12 bytes a row", lambda: gather_statistics),
    ]


def heads(arguments: argparse.Namespace, setting: Setting) -> list[run.Table]:
    """All contestants with the first chunk size; ours also with the other sizes."""
    first, *others = arguments.chunk_rows or [None]
    ours = functools.partial(partial, split_head, chunk_rows=first)
    lines = {
        "xent eager": ours(),
        "xent compiled": compiled(ours()),
        "xent eager, sequence parallel": ours(sequence_parallel=True),
        "xent compiled, sequence parallel": compiled(ours(sequence_parallel=True)),
        "xent eager, logits made again": ours(pipelined=False),
        "xent compiled, logits made again": compiled(ours(pipelined=False)),
        "xent eager, batch_invariant": ours(batch_invariant=True),
        "unfused xent compiled": all_logits,
    }
    for rows in others:
        lines[f"xent eager, {rows}"] = ours(chunk_rows=rows)
        lines[f"xent eager, logits made again, {rows}"] = ours(chunk_rows=rows, pipelined=False)
    known = [
        *units(first),
        *(Contestant(name, "ours", load) for name, load in lines.items()),
        # A capture that fails midway may leave the communicator hanging.
        Contestant("loss_parallel (no graph)", "torch", partial(torch_loss_parallel), captured=False),
    ]
    return run.tables_of(SplitHead, arguments.shapes, arguments.hidden, known, setting)
