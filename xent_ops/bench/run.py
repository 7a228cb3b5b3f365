"""The command: the loop over shapes and variants, and the exit status."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ..kernels.devices import interpreter_is_set
from . import cases, compare, linear, model, plot, report, tails, timing
from .arguments import shapes
from .measure import Result, Settings, copy_times, measure, ours_failed, set_ratios
from .problems import LossProblem, Problem, StepProblem
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
        if arguments.tails and (arguments.plot or arguments.dynamic):
            raise ValueError("--tails is a table of static shapes: leave out --plot and --dynamic")
        if arguments.tails:
            place = "cpu" if on_cpu else "cuda"
            arguments.step = arguments.step or tails.HIDDEN[place]
            arguments.shapes = arguments.shapes or shapes(tails.SHAPES[place])
            arguments.memory = arguments.memory or device.type == "cuda"
        dtype = getattr(torch, arguments.dtype or ("float32" if on_cpu and not arguments.tails else "bfloat16"))
        heads = linear.chosen(arguments, dtype) if arguments.linear else None
        step = model.check(arguments, device) if arguments.model is not None else None
        whole = model.chosen(arguments.only) if step else []
        variants = [] if heads or step else _variants(arguments, dtype, device)
    except (ValueError, RuntimeError) as error:
        arguments.parser.error(str(error))
    if not report.have("rich"):
        print("rich is not installed: plain tables, and a line for each variant (pip install rich)", file=sys.stderr)
    if step:
        return model.run(arguments, step, whole, dtype, device)
    if arguments.linear:
        arguments.memory = timing.measures_memory(device)
    elif arguments.memory and device.type != "cuda":
        print(f"--memory is measured by CUDA's allocator alone: not on {device}", file=sys.stderr)
        arguments.memory = False
    graph = device.type == "cuda" if arguments.graph is None else arguments.graph
    settings = Settings(
        graph=graph,
        memory=arguments.memory,
        budget_ms=arguments.budget,
        busy=None if graph else timing.busy(),  # a captured graph does not wait for the host
    )
    if heads:
        return linear.run(arguments, heads, settings, dtype, device)
    environment = report.environment(device, arguments.command_line)
    report.show_environment(environment, settings.busy)
    content: dict[str, Any] = {
        "environment": environment,
        "settings": {
            "dtype": str(dtype).removeprefix("torch."),
            "step": arguments.step,
            "tails": arguments.tails,
            "ignored": arguments.ignored,
            **vars(settings),
        },
        "copies": [],
        "results": [],
    }
    make: Any = functools.partial(LossProblem, ignored=arguments.ignored)
    if arguments.step is not None:
        make = functools.partial(StepProblem, width=arguments.step, ignored=arguments.ignored)
    todo = arguments.shapes or shapes(DEFAULT_SHAPES["cpu" if on_cpu else "cuda"])
    results: list[Result] = []
    failed = False

    def write() -> None:  # after each shape: a run that is stopped leaves what it has
        if arguments.json:
            report.write_json(arguments.json, content)

    for number, shape in enumerate(todo, 1):
        try:
            problem = make(shape, dtype, device)
            copy = copy_times(problem, settings)
        except RuntimeError as error:  # out of memory, or a device that an earlier variant broke
            print(f"{shape}: not measured, {timing.reason(error)}", file=sys.stderr)
            content["results"].append({"shape": list(shape), "status": "error", "note": timing.reason(error)})
            failed = True
            write()
            continue
        done = _shape(f"{number}/{len(todo)} {shape}", problem, variants, copy, settings)
        rate = 2 * problem.unit / copy.ms / 1e6
        what = "loss" if arguments.step is None else f"step of hidden size {arguments.step}"
        title = f"{shape} {content['settings']['dtype']}, {what}; 1 copy = {copy.ms:.4f} ms ({rate:.3g} GB/s)"
        title = f"THE COPY IS UNSTEADY, AND SO IS ALL BELOW: {copy.doubt}\n{title}" if copy.unsteady else title
        report.show(title, done, report.table(done, settings.memory), arguments.markdown)
        results += done
        content["copies"].append({"shape": list(shape), "ms": copy.ms, "gb_per_s": rate})
        content["results"] += [result.as_json() for result in done]
        write()
        del problem
        timing.collect(device)
    compare.show(arguments, content)
    if arguments.plot and results:
        plot.draw(
            arguments.plot, results, plot.title(environment, content["settings"]["dtype"]), plot.of_loss(arguments.step)
        )
    return int(failed or ours_failed(results))


def _shape(
    title: str, problem: Problem, variants: list[cases.Variant], copy: timing.Times, settings: Settings
) -> list[Result]:
    done = []
    with report.progress(title, len(variants)) as step:
        for variant in variants:
            step(variant.name)
            done.append(measure(problem, variant, copy, settings))
    set_ratios(variants, done)
    for variant, result in zip(variants, done, strict=True):
        if result.ratio is not None:
            ratio = f"{report.figure(result, 'ratio', 3)} x {variant.against}"
            result.note = "; ".join(filter(None, (result.note, ratio)))
    return done
