"""The command: what its arguments ask for, and what is measured of a loss or a step."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..kernels.devices import interpreter_is_set
from . import cases, compare, linear, model, plot, report, tails, timing
from .arguments import shapes
from .measure import Result, Settings, copy_times
from .problems import LossProblem, StepProblem
from .series import Kind, Run
from .sizes import HeadShape, ModelShape, Shape

DEFAULT_SHAPES = {"cuda": "8192x32000,4096x128256", "cpu": "256x4096,64x32000"}


def _redraw(source: Path, arguments: argparse.Namespace) -> None:
    if arguments.plot is None:
        raise ValueError("--redraw FILE draws what is in FILE: add --plot FILE.png")
    measuring = ("device", "shapes", "dtype", "graph", "dynamic", "memory", "step", "tails", "linear", "model")
    given = [
        f"--{name}"
        for name in (*measuring, "ignored", "only", "json", "compare")
        if getattr(arguments, name) not in (None, False)
    ]
    if given:
        raise ValueError(f"--redraw measures nothing: leave out {', '.join(given)}")
    try:
        written = source.read_bytes()
    except OSError as error:
        raise ValueError(f"--redraw {source}: {error.strerror}") from error
    try:
        content = json.loads(written)
        kinds: dict[int, Any] = {len(kind._fields): kind for kind in (Shape, HeadShape, ModelShape)}
        results = [
            Result(**entry | {"shape": kinds[len(entry["shape"])](*entry["shape"])})
            for entry in content["results"]
            if "variant" in entry
        ]
        environment, settings = content["environment"], content["settings"]
        title = plot.title(environment, settings["dtype"])
        figures = plot.OF_LINEAR if settings.get("linear") else plot.of_loss(settings["step"])
        figures = model.figures(results) if settings.get("model") else figures
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--redraw {source}: not what --json writes ({timing.reason(error)})") from error
    plot.draw(arguments.plot, results, title, figures)


def _device(text: str | None) -> torch.device:
    device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda", "xpu"):
        raise ValueError(f"--device {device}: float64, which every result is checked in, needs cpu, cuda or xpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch ({torch.__version__}) sees no GPU; valid here is cpu")
    torch.empty(1, device=device)  # an error that names what is wrong with it
    if device.type == "cuda":
        if interpreter_is_set():
            raise ValueError(
                "TRITON_INTERPRET is set: Triton kernels would run in an interpreter, a thousand times slower, and "
                "every figure would be of that. Unset it."
            )
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def _variants(arguments: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> list[cases.Variant]:
    known = cases.losses(dtype, device, arguments.dynamic)
    if arguments.step:
        known = cases.steps(arguments.dynamic)
    if arguments.tails:
        known = tails.variants()
    return cases.choose(known, arguments.only, cases.PEERS)


def _check_output(path: Path) -> None:
    """Now, not when everything has been measured."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: there is no folder {folder} to write it to")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{path}: cannot be written")


def main(arguments: argparse.Namespace) -> int:
    """0, or 1 where a variant of this package is wrong or fails; peers' failures are their own."""
    try:
        if arguments.plot and not report.have("matplotlib"):
            raise ValueError(plot.MISSING)
        for path in filter(None, (arguments.json, arguments.plot)):
            _check_output(path)
        if arguments.plot and arguments.plot.suffix not in plot.FORMATS:
            raise ValueError(f"--plot {arguments.plot}: the name has to end in one of {', '.join(plot.FORMATS)}")
        if arguments.redraw:
            _redraw(arguments.redraw, arguments)
            return 0
        arguments.before = compare.load(arguments.compare) if arguments.compare else None
        device = _device(arguments.device)
        if arguments.graph and device.type != "cuda":
            raise ValueError(f"--graph: CUDA graphs need a CUDA device, this is {device}; leave it out")
        on_cpu = device.type == "cpu"
        if arguments.linear:
            linear.check(arguments)
        elif arguments.chunk_rows:
            raise ValueError("--chunk-rows is for --linear HIDDEN, which makes logits by chunks of rows")
        elif arguments.token_loss:
            raise ValueError("--token-loss is for --linear HIDDEN: a loss of tokens from hidden states")
        elif arguments.distillation or arguments.beta is not None:
            raise ValueError("--distillation and --beta are for --linear HIDDEN: of the student's hidden states")
        if arguments.interleaved and not arguments.linear:
            raise ValueError("--interleaved is for --linear HIDDEN: its losses overwrite none of their inputs")
        if arguments.tails and (arguments.plot or arguments.dynamic):
            raise ValueError("--tails is a table of static shapes: leave out --plot and --dynamic")
        if arguments.tails:
            place = "cpu" if on_cpu else "cuda"
            arguments.step = arguments.step or tails.HIDDEN[place]
            arguments.shapes = arguments.shapes or shapes(tails.SHAPES[place])
            arguments.memory = arguments.memory or device.type == "cuda"
        dtype = getattr(torch, arguments.dtype or ("float32" if on_cpu and not arguments.tails else "bfloat16"))
        step = model.check(arguments, device) if arguments.model is not None else None
        heads = linear.chosen(arguments, dtype) if arguments.linear else None
        whole = model.chosen(arguments.only, dtype) if step else []
        variants = [] if heads or step else _variants(arguments, dtype, device)
    except (ValueError, RuntimeError) as error:
        arguments.parser.error(str(error))
    if not report.have("rich"):
        print("rich is not installed: plain tables, and a line for each variant (pip install rich)", file=sys.stderr)
    if heads or step:
        arguments.memory = timing.measures_memory(device)
        report.say_if_unmeasured(arguments.memory, device)
    elif arguments.memory and device.type != "cuda":
        print(f"--memory is measured by CUDA's allocator alone: not on {device}", file=sys.stderr)
        arguments.memory = False
    graph = not step and (device.type == "cuda" if arguments.graph is None else arguments.graph)
    settings = Settings(
        graph=graph,
        memory=arguments.memory,
        interleaved=arguments.interleaved,
        budget_ms=arguments.budget,
        busy=None if graph else timing.busy(),  # a captured graph does not wait for the host
        wall=not step,
    )
    run = Run(arguments, settings, dtype, device)
    if step:
        return run.of(model.kind(run, step, whole))
    return run.of(linear.kind(run, heads) if heads else _losses(run, variants))


def _losses(run: Run, variants: Sequence[cases.Variant]) -> Kind:
    arguments = run.arguments
    run.content["copies"] = []
    copies: dict[Shape, timing.Times] = {}
    make: Any = functools.partial(LossProblem, ignored=arguments.ignored)
    if arguments.step is not None:
        make = functools.partial(StepProblem, width=arguments.step, ignored=arguments.ignored)

    def measured(title: str, shape: Shape) -> list[Result]:
        problem = make(shape, run.dtype, run.device)
        copies[shape] = copy = copy_times(problem, run.settings)
        rate = 2 * problem.unit / copy.ms / 1e6
        run.content["copies"].append({"shape": list(shape), "ms": copy.ms, "gb_per_s": rate})
        done = run.in_turn(title, problem, variants, copy)
        for variant, result in zip(variants, done, strict=True):
            if result.ratio is not None:
                ratio = f"{report.figure(result, 'ratio', 3)} x {variant.against}"
                result.note = "; ".join(filter(None, (result.note, ratio)))
        return done

    def shown(shape: Shape, done: Sequence[Result]) -> tuple[str, report.Table]:
        copy, rate = copies[shape], run.content["copies"][-1]["gb_per_s"]
        what = "loss" if arguments.step is None else f"step of hidden size {arguments.step}"
        title = f"{shape} {run.name}, {what}; 1 copy = {copy.ms:.4f} ms ({rate:.3g} GB/s)"
        title = f"THE COPY IS UNSTEADY, AND SO IS ALL BELOW: {copy.doubt}\n{title}" if copy.unsteady else title
        return title, report.table(done, run.settings.memory)

    return Kind(
        {"step": arguments.step, "tails": arguments.tails},
        arguments.shapes or shapes(DEFAULT_SHAPES["cpu" if run.device.type == "cpu" else "cuda"]),
        len(variants),
        measured,
        shown,
        lambda results: plot.of_loss(arguments.step),
    )
