"""The command. It measures tables; a table has a problem and its contestants."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..kernels.devices import interpreter_is_set
from . import contestants, report, timing
from .arguments import Shape, shapes
from .contestants import Contestant
from .measure import Result, measure
from .problems import Head, Loss, Problem, Setting


class Table(NamedTuple):
    name: str
    make: Callable[[], Problem]
    contestants: Sequence[Contestant]


Tables = Callable[[argparse.Namespace, Setting], list[Table]]


def main(arguments: argparse.Namespace) -> int:
    return run(arguments, tables)


def tables(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    on_gpu = setting.device.type != "cpu"
    if arguments.linear:
        sizes = arguments.shapes or shapes("8192x128256" if on_gpu else "256x4096")
        return tables_of(Head, sizes, arguments.linear, contestants.heads(), setting)
    sizes = arguments.shapes or shapes("8192x32000,4096x128256" if on_gpu else "256x4096,64x32000")
    return tables_of(Loss, sizes, (), contestants.losses(), setting)


def tables_of(
    problem: Callable[..., Problem],
    sizes: Sequence[Shape],
    hidden: Sequence[int],
    known: Sequence[Contestant],
    setting: Setting,
) -> list[Table]:
    """A table for each shape and each number of features. A loss of logits has no features."""
    cases = [(shape, size) for size in hidden for shape in sizes] if hidden else [(shape,) for shape in sizes]
    return [
        Table("x".join(map(str, (*shape, *size))), functools.partial(problem, shape, *size, setting), known)
        for shape, *size in cases
    ]


def _device(text: str | None) -> torch.device:
    device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda", "xpu"):
        raise ValueError(f"--device {device}: float64, which every result is checked in, needs cpu, cuda or xpu")
    torch.empty(1, device=device)  # raises torch's own error for a bad device
    if device.type == "cuda":
        if interpreter_is_set():
            raise ValueError(
                "TRITON_INTERPRET is set: Triton kernels would run in an interpreter, a thousand times slower, and "
                "every figure would be of that. Unset it."
            )
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def _setting(arguments: argparse.Namespace) -> Setting:
    device = _device(arguments.device)
    dtype = getattr(torch, arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    budget = arguments.budget or (500 if device.type == "cpu" else 2000)
    graph = device.type == "cuda" and not arguments.eager
    busy = "" if graph else timing.busy()  # a captured graph does not wait for the host
    return Setting(device, dtype, arguments.ignored, budget, graph, row=arguments.eager, busy=busy)


def run(
    arguments: argparse.Namespace, tables: Tables, clock: Callable[[torch.device, bool], timing.Clock] = timing.Clock
) -> int:
    """Return 1 if a line of this package is wrong or fails, otherwise 0. Failures of peers do not count."""
    try:
        if arguments.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib")
        before = report.Before(arguments.compare) if arguments.compare else None
        setting = _setting(arguments)
        planned = tables(arguments, setting)
        chosen = [contestants.choose(table.contestants, arguments.only) for table in planned]
    except (ValueError, RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        arguments.parser.error(str(error))
    peers = [one for one in planned[0].contestants if one.kind == "peer" and one.needs]
    content = report.content(setting, arguments.command_line, peers)
    report.show_environment(content["environment"], setting.busy)
    if before:
        before.show_differences(content)
    results: list[Result] = []
    failed = False
    for table, lines in zip(planned, chosen, strict=True):
        try:
            problem = table.make()
            done = measure(table.name, problem, lines, setting, clock(setting.device, setting.row))
        except RuntimeError as error:  # out of memory, or a device that an earlier contestant broke
            print(f"{table.name}: not measured, {timing.reason(error)}", file=sys.stderr)
            failed = True
            continue
        if before:
            before.add_to(done)
        results += done
        if arguments.json:
            report.write_json(arguments.json, content, results)  # a run that is stopped leaves its results so far
        report.show(f"{table.name} {content['settings']['dtype']}", done, problem.memory_unit)
        del problem
        timing.collect(setting.device)
    if arguments.plot and results:
        environment = content["environment"]
        report.draw(arguments.plot, results, f"{environment['gpu'] or environment['cpu']}: {environment['command']}")
    return int(failed or any(result.kind == "ours" and result.status != "ok" for result in results))
