"""The command. It measures tables; a table has a problem and its contestants."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..kernels.devices import interpreter_is_set
from . import contestants, report, timing
from .arguments import Shape, shapes
from .contestants import Contestant, Peer
from .measure import Result, Settings, measure
from .problems import Head, Loss, Problem

DEFAULT_SHAPES = {"cuda": "8192x32000,4096x128256", "cpu": "256x4096,64x32000"}
DEFAULT_HEADS = {"cuda": "8192x128256", "cpu": "256x4096"}
BUDGETS = {"cuda": 2000, "cpu": 500}


@dataclass(frozen=True)
class Table:
    name: str
    make: Callable[[], Problem]
    contestants: Sequence[Contestant]
    finish: Callable[[list[Result]], None] = lambda results: None  # adds figures of this table only


@dataclass(frozen=True)
class Setting:
    """The device and the settings of all tables of a run."""

    device: torch.device
    dtype: torch.dtype
    ignored: float | None

    @property
    def place(self) -> str:
        return "cpu" if self.device.type == "cpu" else "cuda"


Tables = Callable[[argparse.Namespace, Setting], tuple[list[Table], Sequence[Peer]]]


def main(arguments: argparse.Namespace) -> int:
    return run(arguments, tables)


def tables(arguments: argparse.Namespace, setting: Setting) -> tuple[list[Table], Sequence[Peer]]:
    if not arguments.linear:
        sizes = arguments.shapes or shapes(DEFAULT_SHAPES[setting.place])
        return loss_tables(sizes, contestants.losses(), setting), contestants.PEERS
    sizes = arguments.shapes or shapes(DEFAULT_HEADS[setting.place])
    return head_tables(sizes, arguments.linear, contestants.heads(), setting), contestants.LINEAR_PEERS


def loss_tables(sizes: Sequence[Shape], known: Sequence[Contestant], setting: Setting) -> list[Table]:
    given = setting.dtype, setting.device, setting.ignored
    return [Table(str(shape), functools.partial(Loss, shape, *given), known) for shape in sizes]


def head_tables(
    sizes: Sequence[Shape],
    hidden_sizes: Sequence[int],
    known: Sequence[Contestant],
    setting: Setting,
    problem: Callable[..., Head] = Head,
) -> list[Table]:
    given = setting.dtype, setting.device
    return [
        Table(f"{shape}x{hidden}", functools.partial(problem, shape, *given, hidden, setting.ignored), known)
        for hidden in hidden_sizes
        for shape in sizes
    ]


def _device(text: str | None) -> torch.device:
    device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda", "xpu"):
        raise ValueError(f"--device {device}: float64, which every result is checked in, needs cpu, cuda or xpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch ({torch.__version__}) sees no GPU; valid here is cpu")
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


def _check_output(path: Path) -> None:
    """Raise now if the file cannot be written, not after all measurements."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: there is no folder {folder} to write it to")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{path}: cannot be written")


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--plot {path}: the name has to end in one of .png, .pdf, .svg")


def run(arguments: argparse.Namespace, tables: Tables, clock: type[timing.Clock] = timing.Clock) -> int:
    """Return 1 if a line of this package is wrong or fails, otherwise 0. Failures of peers do not count."""
    try:
        for path in filter(None, (arguments.json, arguments.plot)):
            _check_output(path)
        if arguments.plot:
            _check_plot(arguments.plot)
        before = report.load(arguments.compare) if arguments.compare else None
        device = _device(arguments.device)
        default = "float32" if device.type == "cpu" else "bfloat16"
        setting = Setting(device, getattr(torch, arguments.dtype or default), arguments.ignored)
        planned, peers = tables(arguments, setting)
        chosen = contestants.choose([table.contestants for table in planned], arguments.only, peers)
    except (ValueError, RuntimeError) as error:
        arguments.parser.error(str(error))
    graph = device.type == "cuda" and not arguments.eager
    settings = Settings(
        graph=graph,
        budget_ms=arguments.budget or BUDGETS[setting.place],
        row=arguments.eager,
        busy=None if graph else timing.busy(),  # a captured graph does not wait for the host
    )
    environment = report.environment(device, arguments.command_line, peers)
    report.show_environment(environment, settings.busy, peers)
    asked = {name: value for name, value in vars(arguments).items() if name not in _NOT_SETTINGS}
    dtype = str(setting.dtype).removeprefix("torch.")
    content: dict[str, Any] = {"environment": environment, "settings": {**asked, "dtype": dtype}, "results": []}
    results: list[Result] = []
    failed = False
    for table, lines in zip(planned, chosen, strict=True):
        if not lines:
            continue
        try:
            problem = table.make()
            done = measure(table.name, problem, lines, settings, clock(device, settings.row))
            table.finish(done)
        except RuntimeError as error:  # out of memory, or a device that an earlier contestant broke
            print(f"{table.name}: not measured, {timing.reason(error)}", file=sys.stderr)
            failed = True
            continue
        results += done
        content["results"] += [result.as_json() for result in done]
        report.write_json(arguments.json, content)  # a run that is stopped leaves its results so far
        report.show(f"{table.name} {dtype}", done, problem.unit)
        del problem
        timing.collect(device)
    report.write_json(arguments.json, content)
    if before is not None:
        report.compare(before, content)
    if arguments.plot and results:
        where = environment.get("gpu") or environment["cpu"]
        report.draw(arguments.plot, results, f"{where}, {dtype}, torch {environment['torch']}")
    return int(failed or any(result.kind == "ours" and result.status != "ok" for result in results))


# Arguments that name files, or serve to parse the others.
_NOT_SETTINGS = ("command", "command_line", "parser", "json", "plot", "compare", "tables", "run")
