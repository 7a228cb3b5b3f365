"""The head and the loss over ranks: time, peak memory and errors, beside the products and collectives that it needs.

The unit is what no way can do without: the three products of this rank's classes, one all-reduce of the input's
gradient, one all-gather of 12 bytes a row, each measured in the same run. Contestants give the loss, the whole gradient
of the input and that of this rank's rows of the head.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..distributed import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from ..distributed.parts import share_of_rank
from ..head.sizes import rows_of_chunk
from . import timing
from .cases import products
from .ranks_timing import milliseconds

CALLS = {"cuda": 5, "cpu": 1}  # in a sample; each takes milliseconds, so few keep the device busy
MIB = 2**20
TOLERANCE = 2e-2  # of bfloat16 gradients, relative in the 2-norm


class Problem(NamedTuple):
    """The same on every rank, but for its rows of the head."""

    input: Tensor  # (rows, H)
    head: Tensor  # (classes of this rank, H)
    target: Tensor  # (rows,)
    classes: int
    start: int  # the class of this rank's first row of the head
    chunk_rows: int | None


Step = Callable[[], tuple[Tensor, ...]]  # -> loss, grad_input, grad_head


def _problem(rows: int, classes: int, hidden: int, chunk_rows: int | None, device: str) -> Problem:
    start, size = share_of_rank(classes, dist.get_rank(), dist.get_world_size())
    generator = torch.Generator(device).manual_seed(0)
    input = torch.randn(rows, hidden, device=device, generator=generator).bfloat16()
    target = torch.randint(0, classes, (rows,), device=device, generator=generator)
    generator.manual_seed(1 + start)
    head = (torch.randn(size, hidden, device=device, generator=generator) * 2 / hidden**0.5).bfloat16()
    return Problem(input.requires_grad_(), head.requires_grad_(), target, classes, start, chunk_rows)


def _step(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], problem: Problem, input: Tensor | None = None) -> Step:
    given = problem.input if input is None else input

    def step() -> tuple[Tensor, ...]:
        loss = loss_of(given, problem.head, problem.target)
        return loss.detach(), *torch.autograd.grad(loss, (given, problem.head))

    return step


def _ours(problem: Problem, compiled: bool = False, sequence: bool = False, pipelined: bool = True) -> Step:
    input = problem.input
    if sequence:
        world, rank = dist.get_world_size(), dist.get_rank()
        input = input.detach().chunk(world)[rank].clone().requires_grad_()

    def loss_of(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return vocab_parallel_linear_cross_entropy(
            x,
            w,
            t,
            num_classes=problem.classes,
            chunk_rows=problem.chunk_rows,
            sequence_parallel=sequence,
            pipelined=pipelined,
        )

    return _step(torch.compile(loss_of, fullgraph=True) if compiled else loss_of, problem, input)


def _unfused(problem: Problem) -> Step:
    """All local logits; compiled. The all-reduce that a tensor-parallel layer does follows the backward."""

    def loss_of(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(F.linear(x, w), t, num_classes=problem.classes)

    run = _step(torch.compile(loss_of, fullgraph=True), problem)

    def step() -> tuple[Tensor, ...]:
        loss, grad_input, grad_head = run()
        dist.all_reduce(grad_input)
        return loss, grad_input, grad_head

    return step


def _loss_parallel(problem: Problem) -> Step:
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh(problem.input.device.type, (dist.get_world_size(),))
    shape, stride = torch.Size((problem.classes, problem.head.shape[1])), problem.head.stride()

    def loss_of(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        w = DTensor.from_local(w, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return F.cross_entropy(F.linear(x, w).float(), t)

    run = _step(loss_of, problem)

    def step() -> tuple[Tensor, ...]:
        with loss_parallel():
            loss: Any
            loss, *grads = run()
        return loss.full_tensor(), *grads

    return step


def _cut_cross_entropy(problem: Problem) -> Step:
    module = importlib.import_module("cut_cross_entropy")
    # Releases up to 25.1.1 have none.
    split = module.VocabParallelOptions(problem.start, problem.start + len(problem.head), dist.group.WORLD)
    return _step(functools.partial(module.linear_cross_entropy, vocab_parallel_options=split), problem)


class Contestant(NamedTuple):
    build: Callable[[Problem], Step]
    captured: bool = True  # timed in a CUDA graph; a capture that fails midway may leave the communicator hanging


_recomputed = functools.partial(_ours, pipelined=False)
CONTESTANTS = {
    "xent eager": Contestant(_ours),
    "xent compiled": Contestant(functools.partial(_ours, compiled=True)),
    "xent eager, sequence parallel": Contestant(functools.partial(_ours, sequence=True)),
    "xent compiled, sequence parallel": Contestant(functools.partial(_ours, compiled=True, sequence=True)),
    "xent eager, logits made again": Contestant(_recomputed),
    "xent compiled, logits made again": Contestant(functools.partial(_recomputed, compiled=True)),
    "unfused xent compiled": Contestant(_unfused),
    "loss_parallel (no graph)": Contestant(_loss_parallel, captured=False),
    "cut-cross-entropy (no graph)": Contestant(_cut_cross_entropy, captured=False),
}


def _expected(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, the whole grad_input and this rank's grad_head in float64, some rows at a time."""
    head, rows = problem.head.detach().double(), problem.input.shape[0]
    total = torch.zeros((), dtype=torch.float64, device=head.device)
    grad_input = torch.empty(problem.input.shape, dtype=torch.float64, device=head.device)
    grad_head = torch.zeros_like(head)
    for x, t, grad in zip(
        problem.input.detach().split(512), problem.target.split(512), grad_input.split(512), strict=True
    ):
        logits = x.double() @ head.t()
        top = logits.amax(-1) if len(head) else logits.new_full((len(x),), float("-inf"))
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        column = t - problem.start
        here = (column >= 0) & (column < len(head))
        index = torch.where(here, column, 0)
        chosen = logits.new_zeros(len(x)) if not len(head) else logits.gather(1, index[:, None])[:, 0] * here
        sums = torch.stack([(logits - top[:, None]).exp().sum(-1), chosen])
        dist.all_reduce(sums)
        lse = top + sums[0].log()
        total += (lse - sums[1]).sum() / rows
        gradient = (logits - lse[:, None]).exp()
        if len(head):
            gradient[torch.arange(len(x), device=x.device), index] -= here.double()
        gradient /= rows
        torch.mm(gradient, head, out=grad)
        grad_head.addmm_(gradient.t(), x.double())
    dist.all_reduce(grad_input)
    return total, grad_input, grad_head


def _errors(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    """Of the loss, grad_input and grad_head, relative in the 2-norm, the worst of all ranks."""
    loss, grad_input, grad_head = outputs
    wanted = expected[1]
    if grad_input.shape != wanted.shape:  # this rank's part of the sequence
        wanted = wanted.chunk(dist.get_world_size())[dist.get_rank()]
    pairs = ((loss, expected[0]), (grad_input, wanted), (grad_head, expected[2]))
    found = torch.stack([(a.double() - b).norm() / b.norm().clamp(min=1e-300) for a, b in pairs])
    found = torch.nan_to_num(found, nan=float("inf"))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def _everywhere(ok: bool, device: str) -> bool:
    flag = torch.tensor(float(ok), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def _time(run: Callable[[], object], device: str, repeat: int, captured: bool = True) -> float:
    """Of one call; on a GPU of a replay of its CUDA graph."""
    if captured and device == "cuda":
        run = timing.capture(run, torch.device("cuda", torch.cuda.current_device()))
    return milliseconds(run, device, repeat, CALLS[device])


def _chunk_rows(problem: Problem) -> int:
    per_rank = -(-problem.classes // dist.get_world_size())
    return rows_of_chunk(len(problem.input), problem.input, per_rank, False, problem.chunk_rows)


@torch.no_grad()
def _units(problem: Problem, device: str, repeat: int) -> dict[str, float]:
    input, head = problem.input.detach(), problem.head.detach()
    rows, world = input.shape[0], dist.get_world_size()

    def by_chunks() -> None:
        total = torch.empty_like(head)
        for number, x in enumerate(input.split(_chunk_rows(problem))):
            logits = torch.mm(x, head.t())
            torch.mm(logits, head)
            torch.addmm(total, logits.t(), x, beta=float(number > 0), out=total)

    total, stats = torch.empty_like(input), torch.zeros(3 * rows, device=device)
    gathered = torch.zeros(world * stats.numel(), device=device)
    return {
        "three local products": _time(lambda: products(input, head), device, repeat),
        "all-reduce of the input's gradient": _time(lambda: dist.all_reduce(total), device, repeat),
        "all-gather of 12 bytes a row": _time(lambda: dist.all_gather_into_tensor(gathered, stats), device, repeat),
        "(the products by chunks)": _time(by_chunks, device, repeat),
    }


def run(rows: int, classes: int, hidden: int, chunk_rows: list[int | None], repeat: int, device: str) -> list[str]:
    """The report, as lines: all contestants with the first size of chunks, ours with the others too."""
    problem = _problem(rows, classes, hidden, chunk_rows[0], device)
    units = _units(problem, device, repeat)
    products, *collectives = list(units.values())[:3]
    unit = products + sum(collectives)
    itemsize = problem.head.element_size()
    gradients = (problem.input.numel() + problem.head.numel()) * itemsize / MIB
    of_chunk = _chunk_rows(problem) * problem.head.shape[0] * itemsize / MIB
    text = [
        f"{rows} x {hidden} x {classes} bfloat16 over {dist.get_world_size()} ranks on {device}",
        *(f"{name:36} {value:9.3f} ms" for name, value in units.items()),
        f"{'unit: the first three':36} {unit:9.3f} ms",
        *(
            f"{f'limit: {factor:.2f} products + collectives':36} {limit:9.3f} ms {limit / unit:6.3f}"
            for factor in (1.10, 1.42)
            for limit in [factor * products + sum(collectives)]
        ),
        f"chunks of {_chunk_rows(problem)} rows; local gradients {gradients:.0f} MiB",
        f"limit of memory: the gradients, two chunks, 100 MiB: {gradients + 2 * of_chunk + 100:.0f} MiB",
        "",
        f"{'':36} {'ms':>9} {'unit':>6} {'MiB':>7}   errors of loss, input, head",
    ]
    expected = _expected(problem)
    contestants = [(name, contestant, problem) for name, contestant in CONTESTANTS.items()]
    for size in chunk_rows[1:]:
        other = problem._replace(chunk_rows=size)
        for name in ("xent eager", "xent eager, logits made again"):
            contestants.append((f"{name}, {size}", CONTESTANTS[name], other))
    for name, contestant, of_size in contestants:
        text.append(f"{name:36} {_measured(contestant, of_size, expected, unit, device, repeat)}")
        if dist.get_rank() == 0:
            print(text[-1], file=sys.stderr, flush=True)  # a run that is cut short has told something
        torch.compiler.reset()
    return text


def _measured(
    contestant: Contestant,
    problem: Problem,
    expected: tuple[Tensor, ...],
    unit: float,
    device: str,
    repeat: int,
) -> str:
    reason, step, outputs = "", None, None
    try:
        step = contestant.build(problem)
        outputs = step()  # compiles, and tunes
    except Exception as error:  # a peer that is not installed, or cannot do this
        reason = timing.reason(error)[:80]
    everywhere = _everywhere(not reason, device)
    if step is None or outputs is None or not everywhere:
        return f"left out: {reason or 'failed on another rank'}"
    errors = _errors(outputs, expected)
    del outputs
    peak = f"{timing.peak_bytes(step, problem.head.device)[1] / MIB:7.0f}" if device == "cuda" else f"{'':7}"
    time = _time(step, device, repeat, contestant.captured)
    numbers = " ".join(f"{error:.1e}" for error in errors)
    return f"{time:9.3f} {time / unit:6.3f} {peak}   {numbers}{'' if max(errors) <= TOLERANCE else '  WRONG'}"
