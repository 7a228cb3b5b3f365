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
from xent_ops.bench import check, run, timing
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import COPY, Contestant, Function, Outputs, Peer, compiled, copies, products
from xent_ops.bench.problems import Head, Loss, Problem
from xent_ops.distributed import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from xent_ops.distributed.parts import share_of_rank
from xent_ops.head.sizes import rows_of_chunk

NECESSARY = "products and collectives"
TOLERANCE = 2e-2  # for bfloat16 gradients, relative in the 2-norm
Found = tuple[list[run.Table], Sequence[Peer]]


class Clock(timing.Clock):
    """Times a row of calls that all ranks begin together. The host can run ahead of the device."""

    def __init__(self, device: torch.device, row: bool = True) -> None:
        super().__init__(device, row=True)

    def agree(self, ms: float) -> float:
        return worst_of_ranks([ms], self.device)[0]

    def block(self, run: timing.Action, before: timing.Action | None, count: int) -> list[float]:
        dist.barrier()
        return super().block(run, before, count)


def worst_of_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    found = torch.tensor(values, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def main(arguments: argparse.Namespace) -> int:
    alone = getattr(arguments, "alone", None)
    if alone is not None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=alone)
    else:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            arguments.device = f"cuda:{os.environ['LOCAL_RANK']}"
    with contextlib.ExitStack() as stack:
        if dist.get_rank() > 0:
            arguments.json = arguments.plot = arguments.compare = None
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        status = run.run(arguments, arguments.tables, Clock)
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

    def verdict(self, outputs: Outputs, *expected: Tensor) -> check.Verdict:
        """The largest errors over all ranks, of the loss and the gradients."""
        errors = [check.worst((outputs.loss.double() - expected[0]).abs() / expected[0].abs())]
        for grad, wanted in zip(outputs.grads, expected[1:], strict=True):
            errors.append(check.worst(check.relative_error(grad, wanted)))
        names = ("loss", "gradient") if len(errors) == 2 else ("loss", "dH", "dW")
        return check.Verdict(
            dict(zip(names, worst_of_ranks(errors, self.device), strict=True)), dict.fromkeys(names, TOLERANCE)
        )


class SplitLoss(Split, Loss):
    def __init__(self, alone: bool, shape: Shape, *given: Any) -> None:
        super().__init__(shape, *given)
        self.alone = alone
        self.whole, self.source = self.source, self.source[:, self.classes()].contiguous()
        self.logits = self.source.clone()
        self.unit = (self.logits.nbytes, "shards")

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Verdict:
        if self.alone:  # nothing is gathered, and the losses are wrong
            return check.Verdict()
        share = check.cross_entropy(self.target, self.weight, contestant.options)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        grad = torch.empty(self.source.shape, dtype=torch.float64, device=self.device)
        for part in check.chunks(*self.shape):
            value, row_tensors = check.differentiated(share, self.whole[part], part)
            total += value
            grad[part] = row_tensors[:, self.classes()]
        return self.verdict(outputs, total, grad)


class SplitHead(Split, Head):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.part = self.matrix[self.classes()].clone()

    def inputs(self) -> tuple[Tensor, ...]:
        return self.hidden, self.part

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Verdict:
        loss, hidden, matrix = self.expected(contestant.options)
        if outputs.grads[0].shape != hidden.shape:  # this rank's part of the sequence
            hidden = hidden.chunk(dist.get_world_size())[dist.get_rank()]
        return self.verdict(outputs, loss, hidden, matrix[self.classes()])


def of_a_dtensor(classes: int) -> Function:
    """An eager step of ``xent_ops.cross_entropy`` on the same shards as a DTensor."""
    kept: list[Any] = []

    def step(logits: Tensor, target: Tensor, weight: Tensor) -> Outputs:
        if not kept:
            mesh = init_device_mesh(logits.device.type, (dist.get_world_size(),))
            size: dict[str, Any] = {"shape": torch.Size((len(logits), classes)), "stride": (classes, 1)}
            whole = DTensor.from_local(logits.detach(), mesh, [Shard(1)], run_check=False, **size)
            kept.append(whole.requires_grad_())
        loss: Any = xent_ops.cross_entropy(kept[0], target)
        grad: Any
        (grad,) = torch.autograd.grad(loss, kept)
        value: Any = loss.detach()
        return Outputs(value.to_local() if isinstance(loss, DTensor) else value, (grad.to_local(),))

    return step


def losses(arguments: argparse.Namespace, setting: run.Setting) -> Found:
    """Steps of the loss. CUDA graphs, and steps without autograd's own thread, show the host's part of the time."""
    alone = arguments.alone is not None

    def known(shape: Shape) -> list[Contestant]:
        def loss(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            return vocab_parallel_cross_entropy(logits, target, num_classes=shape.classes)

        def one_thread(logits: Tensor, target: Tensor, weight: Tensor) -> Outputs:
            with torch.autograd.set_multithreading_enabled(False):
                value = loss(logits, target, weight)
                return Outputs(value.detach(), torch.autograd.grad(value, (logits,)))

        def gather(logits: Tensor, target: Tensor, weight: Tensor) -> Outputs:
            gather_statistics(len(logits), logits.device)
            return Outputs(logits.new_zeros(()), ())

        eager = Contestant("eager", "ours", lambda: loss, COPY, captured=False)
        whole = Contestant("compiled", "ours", compiled(lambda: loss), COPY, captured=False)
        found = [
            *copies(),
            Contestant("all-gather of 12 bytes a row", "torch", lambda: gather, COPY, unit="all-gather"),
            eager,
            replace(eager, name="eager, DTensor", load=functools.partial(of_a_dtensor, shape.classes)),
            replace(eager, name="eager, one thread", load=lambda: one_thread),
            whole,
        ]
        if setting.device.type == "cuda":
            found += [replace(one, name=f"{one.name}, in a CUDA graph", captured=True) for one in (eager, whole)]
        return found

    given = setting.dtype, setting.device, setting.ignored
    make = functools.partial(SplitLoss, alone)
    return [
        run.Table(str(shape), functools.partial(make, shape, *given), known(shape)) for shape in arguments.shapes
    ], ()


@functools.cache
def _statistics(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(3 * rows * dist.get_world_size(), device=device), torch.zeros(3 * rows, device=device)


def gather_statistics(rows: int, device: torch.device) -> None:
    dist.all_gather_into_tensor(*_statistics(rows, device))


def split_loss(classes: int, chunk_rows: int | None = None, **options: Any) -> Function:
    return lambda hidden, part, target: vocab_parallel_linear_cross_entropy(
        hidden, part, target, num_classes=classes, chunk_rows=chunk_rows, **options
    )


def on_a_sequence(load: Callable[[], Function]) -> Callable[[], Function]:
    """Call the loss with the hidden states of this rank's part of the rows."""

    def load_it() -> Function:
        loss, kept = load(), list[Tensor]()

        def step(hidden: Tensor, part: Tensor, target: Tensor) -> Outputs:
            if not kept:
                kept.append(hidden.detach().chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_())
            value = loss(kept[0], part, target)
            return Outputs(value.detach(), torch.autograd.grad(value, (kept[0], part)))

        return step

    return load_it


def all_logits(classes: int) -> Function:
    """A compiled step with all local logits. After the backward comes the all-reduce of a tensor-parallel layer."""
    loss = compiled(lambda: lambda x, w, t: vocab_parallel_cross_entropy(F.linear(x, w), t, num_classes=classes))()

    def step(hidden: Tensor, part: Tensor, target: Tensor) -> Outputs:
        value = loss(hidden, part, target)
        grads = torch.autograd.grad(value, (hidden, part))
        dist.all_reduce(grads[0])
        return Outputs(value.detach(), grads)

    return step


def of_loss_parallel(classes: int) -> Function:
    def step(hidden: Tensor, part: Tensor, target: Tensor) -> Outputs:
        mesh = init_device_mesh(hidden.device.type, (dist.get_world_size(),))
        size: dict[str, Any] = {"shape": torch.Size((classes, part.shape[1])), "stride": part.stride()}
        x = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        w = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, **size)
        with loss_parallel():
            loss: Any = F.cross_entropy(F.linear(x, w).float(), target)
            grads = torch.autograd.grad(loss, (hidden, part))
        return Outputs(loss.detach().full_tensor(), grads)

    return step


def units(chunk_rows: int | None) -> list[Contestant]:
    """The work that every step needs, together and by parts."""

    def reduce(hidden: Tensor) -> None:
        dist.all_reduce(torch.zeros_like(hidden))

    def by_chunks(hidden: Tensor, part: Tensor) -> None:
        total = torch.empty_like(part)
        rows = rows_of_chunk(len(hidden), hidden, len(part), False, chunk_rows)
        for number, x in enumerate(hidden.split(rows)):
            logits = torch.mm(x, part.t())
            torch.mm(logits, part)
            torch.addmm(total, logits.t(), x, beta=float(number > 0), out=total)

    def necessary(hidden: Tensor, part: Tensor) -> None:
        products(hidden, part)
        reduce(hidden)
        gather_statistics(len(hidden), hidden.device)

    ways: dict[str, Callable[[Tensor, Tensor], object]] = {
        NECESSARY: necessary,
        "three local products": lambda hidden, part: products(hidden, part),
        "the products by chunks": by_chunks,
        "all-reduce of the input's gradient": lambda hidden, part: reduce(hidden),
        "all-gather of 12 bytes a row": lambda hidden, part: gather_statistics(len(hidden), hidden.device),
    }

    def step(way: Callable[[Tensor, Tensor], object], hidden: Tensor, part: Tensor, target: Tensor) -> Outputs:
        way(hidden.detach(), part.detach())
        return Outputs(hidden.new_zeros(()), ())

    load = functools.partial(functools.partial, functools.partial, step)
    return [Contestant(name, "torch", load(way), NECESSARY, unit=name) for name, way in ways.items()]


def heads(arguments: argparse.Namespace, setting: run.Setting) -> Found:
    """All contestants with the first chunk size; ours also with the other sizes."""

    def known(classes: int) -> list[Contestant]:
        first, *others = arguments.chunk_rows or [None]
        ours = functools.partial(functools.partial, split_loss, classes, first)
        lines: list[tuple[str, Callable[[], Function]]] = [
            ("xent eager", ours()),
            ("xent compiled", compiled(ours())),
            ("xent eager, sequence parallel", on_a_sequence(ours(sequence_parallel=True))),
            ("xent compiled, sequence parallel", on_a_sequence(compiled(ours(sequence_parallel=True)))),
            ("xent eager, logits made again", ours(pipelined=False)),
            ("xent compiled, logits made again", compiled(ours(pipelined=False))),
            ("xent eager, batch_invariant", ours(batch_invariant=True)),
            ("unfused xent compiled", functools.partial(all_logits, classes)),
        ]
        for rows in others:
            row_tensors = functools.partial(functools.partial, split_loss, classes, rows)
            lines += [
                (f"xent eager, {rows}", row_tensors()),
                (f"xent eager, logits made again, {rows}", row_tensors(pipelined=False)),
            ]
        parallel = functools.partial(of_loss_parallel, classes)
        return [
            *units(first),
            *(Contestant(name, "ours", load, NECESSARY) for name, load in lines),
            # A capture that fails midway may leave the communicator hanging.
            Contestant("loss_parallel (no graph)", "torch", parallel, NECESSARY, captured=False),
        ]

    found = []
    for shape in arguments.shapes:
        found += run.head_tables([shape], arguments.hidden, known(shape.classes), setting, SplitHead)
    return found, ()
