"""What an eager step launches and calls, and what a step of head and loss costs the host, eager and compiled."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import xent_ops

HELP = "kernels and operator calls of an eager step, and the host's time for a step of head and loss"
ROWS, FEATURES, CLASSES = 64, 64, 1024


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    logits: Tensor
    target: Tensor  # a fifth is ignored
    token_weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    ids: Tensor  # of 8 classes a row, ignored where the target is
    probs: Tensor

    @classmethod
    def on(cls, device: str) -> Inputs:
        def random_numbers(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        heads = [random_numbers(*shape) for shape in ((ROWS, FEATURES), (CLASSES, FEATURES))]
        leaves = [tensor.clone().requires_grad_() for tensor in (*heads, random_numbers(ROWS, CLASSES))]
        target = torch.randint(0, CLASSES, (ROWS,), device=device)
        target[::5] = -100
        probs, ids = random_numbers(ROWS, CLASSES).float().softmax(-1).topk(8)
        ids[::5] = -100
        return cls(*leaves, target, torch.rand(ROWS, device=device), *heads, ids, probs)


def _token_loss(x: Inputs) -> Tensor:
    reinforce = lambda stats, advantage: -advantage * stats.log_probs  # noqa: E731
    return xent_ops.linear_token_loss(x.hidden, x.weight, x.target, reinforce, rows=(x.token_weight,))


def _linear(x: Inputs, **options: Any) -> Tensor:
    return xent_ops.linear_cross_entropy(x.hidden, x.weight, x.target, **options)


def _top_k(x: Inputs, tail: bool) -> Tensor:
    return xent_ops.linear_top_k_distillation_loss(x.hidden, x.weight, x.ids, x.probs, tail=tail)


def _weighted(x: Inputs) -> dict[str, Any]:
    return {"lse_square_scale": 1e-4, "token_weight": x.token_weight}


STEPS: dict[str, Callable[[Inputs], Tensor]] = {
    "F.cross_entropy(F.linear(x, w).float())": lambda x: F.cross_entropy(
        F.linear(x.hidden, x.weight).float(), x.target
    ),
    "cross_entropy": lambda x: xent_ops.cross_entropy(x.logits, x.target),
    "cross_entropy, grad_in_forward=True": lambda x: xent_ops.cross_entropy(x.logits, x.target, grad_in_forward=True),
    "cross_entropy, token_weight": lambda x: xent_ops.cross_entropy(x.logits, x.target, token_weight=x.token_weight),
    "token_log_probs": lambda x: xent_ops.token_log_probs(x.logits, x.target).log_probs.sum(),
    "cross_entropy_outputs": lambda x: xent_ops.cross_entropy_outputs(x.logits, x.target).loss,
    "linear_cross_entropy": _linear,
    "linear_cross_entropy, z-loss and token_weight": lambda x: _linear(x, **_weighted(x)),
    "linear_cross_entropy, a sum with a divisor": lambda x: _linear(x, reduction="sum", divisor=50.0),
    'linear_cross_entropy, reduction="none"': lambda x: _linear(x, reduction="none").sum(),
    "linear_cross_entropy_outputs": lambda x: xent_ops.linear_cross_entropy_outputs(x.hidden, x.weight, x.target).loss,
    "linear_token_log_probs": lambda x: xent_ops.linear_token_log_probs(x.hidden, x.weight, x.target).log_probs.sum(),
    "linear_token_loss, reinforce": _token_loss,
    "linear_distillation_loss": lambda x: xent_ops.linear_distillation_loss(
        x.hidden, x.weight, x.teacher_hidden, x.teacher_weight
    ),
    "linear_top_k_distillation_loss": lambda x: _top_k(x, tail=False),
    "linear_top_k_distillation_loss, tail=True": lambda x: _top_k(x, tail=True),
}


class Counts(NamedTuple):
    kernels: int  # on a GPU
    calls: int  # of operators of torch and of ours, also inside others


def count(name: str, inputs: Inputs) -> Counts:
    """Forward and backward, after a warm-up."""

    def step() -> None:
        for leaf in inputs[:3]:
            leaf.grad = None
        STEPS[name](inputs).backward()

    on_gpu = inputs.hidden.is_cuda
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiled:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    events = profiled.events() or []
    on_device = [event.name for event in events if event.device_type != DeviceType.CPU]
    calls = [event for event in events if event.device_type == DeviceType.CPU]
    return Counts(
        sum(not name.startswith(("Memcpy", "Memset")) for name in on_device),
        sum(event.name.startswith(("aten::", "xent::")) for event in calls),
    )


BASELINE, OURS = "F.cross_entropy(F.linear(x, w).float())", "linear_cross_entropy"


def host_times(inputs: Inputs, blocks: int, steps: int = 100) -> dict[str, float]:
    """Microseconds of a step in a row of steps, which the host launches: the median of blocks in a random order."""
    variants: dict[str, Callable[[Inputs], Tensor]] = {}
    for name in (BASELINE, OURS):
        variants |= {name: STEPS[name], f"{name}, compiled": torch.compile(STEPS[name])}

    def block(loss: Callable[[Inputs], Tensor]) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            for leaf in inputs[:3]:
                leaf.grad = None
            loss(inputs).backward()
        if inputs.hidden.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps * 1e6

    order = list(variants) * blocks
    random.Random(0).shuffle(order)
    for name in variants:
        block(variants[name])
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name in order:
        times[name].append(block(variants[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def main(arguments: argparse.Namespace) -> int:
    inputs = Inputs.on(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    where = torch.cuda.get_device_name() if inputs.hidden.is_cuda else "a CPU"
    print(f"torch {torch.__version__}, {where}, bfloat16\n")
    print(f"| eager step, {ROWS} x {FEATURES} x {CLASSES} | kernels | operator calls |\n| --- | ---: | ---: |")
    for name in STEPS:
        counts = count(name, inputs)
        print(f"| {name} | {counts.kernels if inputs.hidden.is_cuda else '-'} | {counts.calls} |")
    times = host_times(inputs, arguments.blocks)
    print("\n| host, us a step | | beside F |\n| --- | ---: | ---: |")
    for name, value in times.items():
        baseline = times[BASELINE + ", compiled" * name.endswith("compiled")]
        print(f"| {name} | {value:.0f} | {value / baseline:.2f} |")
    return 0
