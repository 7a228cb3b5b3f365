"""A step of a head and its loss from an AOTInductor package beside torch.compile's: python tools/aoti_step.py

loss and both gradients of hidden (8192, 2048) and a head of 32000 classes, bfloat16, on a GPU. Prints milliseconds by
CUDA events, the median of 50 steps each, taken in turns, their ratio, and the peak of memory above the inputs.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import xent_ops

ROWS, FEATURES, CLASSES, STEPS = 8192, 2048, 32000, 50


def whole(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    return xent_ops.cross_entropy(hidden @ head.t(), target)


def chunks(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    return xent_ops.linear_cross_entropy(hidden, head, target)


def step_of(loss: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def step(hidden: Tensor, head: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        hidden, head = hidden.detach().requires_grad_(), head.detach().requires_grad_()
        value = loss(hidden, head, target)
        return value.detach(), *torch.autograd.grad(value, (hidden, head))

    return step


def milliseconds(step: Callable[..., Any], inputs: tuple[Tensor, ...]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step(*inputs)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def peak(step: Callable[..., Any], inputs: tuple[Tensor, ...]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(*inputs)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) // 2**20


def main() -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    hidden, head = torch.randn(ROWS, FEATURES, **options), torch.randn(CLASSES, FEATURES, **options) / FEATURES**0.5
    inputs = hidden, head, torch.randint(CLASSES, (ROWS,), device="cuda")
    for loss in (whole, chunks):
        step = step_of(loss)
        compiled = step_of(torch.compile(loss, fullgraph=True))
        program = torch.export.export(make_fx(step)(*inputs), inputs)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "step.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=path)
            package = torch._inductor.aoti_load_package(path)
        steps = {"package": package, "compiled": compiled, "eager": step}
        memory = {}
        for name, run in steps.items():
            for _ in range(3):
                run(*inputs)
            memory[name] = peak(run, inputs)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(STEPS):
            for name, run in steps.items():
                times[name].append(milliseconds(run, inputs))
        medians = {name: statistics.median(found) for name, found in times.items()}
        ratio = medians["package"] / medians["compiled"]
        shown = ", ".join(f"{name} {medians[name]:.3f} ms {memory[name]} MiB" for name in steps)
        print(f"{loss.__name__}: {shown}; package / compiled {ratio:.3f}")


if __name__ == "__main__":
    main()
