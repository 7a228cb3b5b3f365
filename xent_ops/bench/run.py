"""The command: arguments, the loop over shapes and variants, and the exit status."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ..ops.devices import interpreter_is_set
from . import cases, compare, linear, model, plot, report, tails, timing
from .llama import ModelShape
from .measure import Result, Settings, copy_times, measure, ours_failed, set_ratios
from .problems import HeadShape, LossProblem, Problem, Shape, StepProblem

HELP = "time this package's loss beside torch's and its peers' on your device; each is checked against float64 first"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
DEFAULT_SHAPES = {"cuda": "8192x32000,4096x128256", "cpu": "256x4096,64x32000"}


def shapes(text: str) -> list[Shape]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+)\s*", part)
        if match is None or not (1 <= int(match[1]) < 2**63 and 2 <= int(match[2]) < 2**63):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a shape; expected ROWSxCLASSES with at least 1 row and 2 classes, separated by "
                "commas, such as 8192x32000,4096x128256"
            )
        found.append(Shape(int(match[1]), int(match[2])))
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction of the rows; expected 0 or more and less than 1")
    return value


def _list(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1, xpu (default: cuda where there is a GPU)")
    parser.add_argument("--shapes", type=shapes, metavar="NxV,...", help="rows x classes, as 8192x32000,4096x128256")
    parser.add_argument("--dtype", choices=DTYPES, help="of the logits (default: bfloat16 on a GPU, float32 on a CPU)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--graph", dest="graph", action="store_true", default=None, help="in CUDA graphs (CUDA's default)")
    how.add_argument("--eager", dest="graph", action="store_false", help="launched by the host; adds the wall time")
    parser.add_argument("--dynamic", action="store_true", help="also variants compiled for any number of rows")
    parser.add_argument("--memory", action="store_true", help="also peak memory, in sizes of the logits (CUDA)")
    parser.add_argument(
        "--step", type=_positive, metavar="HIDDEN", help="time hidden @ W.T -> loss -> backward, of this hidden size"
    )
    parser.add_argument(
        "--tails", action="store_true", help="time steps with softcap, scale and upcast before the loss, in bfloat16"
    )
    parser.add_argument(
        "--linear",
        type=_list,
        metavar="HIDDEN,...",
        help="time linear cross entropy: head and loss as one, of these sizes",
    )
    parser.add_argument(
        "--chunk-rows",
        type=_list,
        metavar="ROWS,...",
        help="with --linear: a line of ours for each number of rows a chunk",
    )
    parser.add_argument(
        "--model",
        type=model.sizes,
        nargs="?",
        const="",
        metavar="KEY=N,...",
        help=f"time whole training steps of a Llama-like decoder; keys: {', '.join(model.KEYS)}",
    )
    parser.add_argument(
        "--ignored", type=_fraction, metavar="FRACTION", help="rows that are ignored, as 0.9 (default: every 17th)"
    )
    parser.add_argument("--only", metavar="WORDS,...", help="only variants whose names contain one of these")
    parser.add_argument("--budget", type=_positive, default=100, metavar="MS", help="time per figure (default: 100 ms)")
    parser.add_argument("--markdown", action="store_true", help="tables that can be pasted into an issue or a document")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="a last table: beside what an earlier --json wrote, line by line"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and environment; after each shape")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times, in copies, and the memory")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="--plot what an earlier --json wrote, and no more")


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
        dtype = DTYPES[arguments.dtype or ("float32" if on_cpu and not arguments.tails else "bfloat16")]
        heads = linear.chosen(arguments, dtype) if arguments.linear else None
        step = model.check(arguments, device) if arguments.model is not None else None
        whole = model.chosen(arguments.only) if step else []
        variants = [] if heads or step else _variants(arguments, dtype, device)
    except (ValueError, RuntimeError) as error:
        arguments.parser.error(str(error))
    if not report.have("rich"):
        print("rich is not installed: plain tables, and no progress (pip install rich)", file=sys.stderr)
    if step:
        return model.run(arguments, step, whole, dtype, device)
    if arguments.linear:
        arguments.memory = timing.measures_memory(device)
    elif arguments.memory and device.type != "cuda":
        print(f"--memory is measured by CUDA's allocator alone: not on {device}", file=sys.stderr)
        arguments.memory = False
    settings = Settings(
        graph=device.type == "cuda" if arguments.graph is None else arguments.graph,
        memory=arguments.memory,
        budget_ms=arguments.budget,
    )
    if heads:
        return linear.run(arguments, heads, settings, dtype, device)
    environment = report.environment(device, arguments.command_line)
    report.show_environment(environment)
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
        title = "; ".join(filter(None, (title, copy.doubt)))
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
