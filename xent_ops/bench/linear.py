"""``--linear``: the head and the loss as one, beside the three products that no way to compute them can do without."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from . import cases, distillation, linear_cases, plot, report, token_loss
from .linear_cases import FORWARD_UNIT, TEACHER_UNIT, UNIT, LinearVariant
from .linear_problem import LinearProblem
from .measure import Result
from .series import Kind, Run
from .sizes import HeadShape, Shape

DEFAULT_SHAPES = {"cuda": [Shape(8192, 128256)], "cpu": [Shape(256, 4096)]}
AGAIN = {unit: f"{unit} again" for unit in (UNIT, TEACHER_UNIT)}
UNITS = (UNIT, TEACHER_UNIT, FORWARD_UNIT, *AGAIN.values())


def check(arguments: argparse.Namespace) -> None:
    if arguments.token_loss and arguments.chunk_rows:
        raise ValueError("--token-loss takes chunks of the default size: leave out --chunk-rows")
    if arguments.distillation and (arguments.chunk_rows or arguments.token_loss):
        raise ValueError("--distillation takes chunks of the default size: leave out --chunk-rows and --token-loss")
    if arguments.beta is not None and not arguments.distillation:
        raise ValueError("--beta is for --distillation TEACHER_HIDDEN")
    others = [f"--{name}" for name in ("step", "tails", "dynamic") if getattr(arguments, name)]
    if others:
        raise ValueError(f"--linear is a table of its own: leave out {', '.join(others)}")


def chosen(arguments: argparse.Namespace, dtype: torch.dtype) -> list[LinearVariant]:
    """With the products first, and at the end again: a GPU that slows down as it warms up is seen there."""
    known, missing = linear_cases.variants(dtype, arguments.chunk_rows or [None])
    if arguments.token_loss:
        known, missing = token_loss.variants(arguments.token_loss)
    elif arguments.distillation:
        known, missing = distillation.variants(_beta(arguments))
    variants = cases.choose(known, arguments.only, linear_cases.PEERS, missing)
    units = [name for name in UNITS if any(variant.against == name for variant in variants)]
    again = [linear_cases.unit(name, AGAIN[name], against=name) for name in units if name in AGAIN]
    return [*(linear_cases.unit(name) for name in units), *variants, *again]


def _beta(arguments: argparse.Namespace) -> float:
    return 0.0 if arguments.beta is None else arguments.beta


def kind(run: Run, variants: Sequence[LinearVariant]) -> Kind:
    arguments, memory = run.arguments, run.settings.memory
    given = arguments.shapes or DEFAULT_SHAPES["cpu" if run.device.type == "cpu" else "cuda"]
    # Not what is measured against one product.
    names = {variant.name for variant in variants if not variant.forward_alone} - {FORWARD_UNIT, *AGAIN.values()}

    def measured(title: str, shape: HeadShape) -> list[Result]:
        given = (shape, run.dtype, run.device)
        if arguments.token_loss:
            problem = token_loss.problem(arguments.token_loss, *given, ignored=arguments.ignored)
        elif arguments.distillation:
            of_teacher = (arguments.distillation, _beta(arguments))
            problem = distillation.DistillationProblem(of_teacher, *given, ignored=arguments.ignored)
        else:
            problem = LinearProblem(*given, ignored=arguments.ignored)
        # Before the clock starts: it brings a GPU to the temperature and the clock rate at which all are measured, and
        # if memory is short, no variant takes the blame.
        problem.expected()
        return run.in_turn(title, problem, variants, None)

    def shown(shape: HeadShape, done: Sequence[Result]) -> tuple[str, report.Table]:
        unit = f"; 1 = {done[0].ms:.4f} ms" if done[0].variant in AGAIN and done[0].ms else ""
        what = f"{arguments.token_loss} of tokens" if arguments.token_loss else "loss"
        if arguments.distillation:
            what = f"distillation of a teacher of {arguments.distillation}, beta {_beta(arguments)}"
        return f"{shape} {run.name}, forward + backward of head and {what}{unit}", _table(done, memory)

    def conclude(results: Sequence[Result]) -> None:
        if len(arguments.chunk_rows or []) > 1:
            _show_chunks(results, variants, arguments.chunk_rows, memory)

    return Kind(
        {name: getattr(arguments, name) for name in ("linear", "chunk_rows", "token_loss", "distillation", "beta")},
        [HeadShape(shape.rows, shape.classes, hidden) for hidden in arguments.linear for shape in given],
        len(variants),
        measured,
        shown,
        lambda results: plot.OF_LINEAR,
        lambda results: [result for result in results if result.variant in names],
        conclude,
        linear_cases.PEERS,
    )


def _table(results: Sequence[Result], memory: bool) -> report.Table:
    head = ["variant", "ms", "ratio"] + ["peak MiB"] * memory + ["loss error", "dH error", "dW error", "status"]
    rows = []
    for result in results:
        row = [result.variant, report.figure(result, "ms", 4), report.figure(result, "ratio", 3)]
        row += [report.number(result.peak_mib, 0)] * memory
        errors = [None if result.variant in UNITS else result.loss_error, result.hidden_error, result.head_error]
        row += [report.error_text(error) for error in errors]
        rows.append([*row, report.status(result)])
    return head, rows


def _show_chunks(
    results: Sequence[Result], variants: Sequence[LinearVariant], chunk_rows: Sequence[int], memory: bool
) -> None:
    """A table for each way of ours: a line a shape, a column a number of rows of a chunk."""
    found = {(result.variant, result.shape): result for result in results}
    shapes = list(dict.fromkeys(result.shape for result in results))
    names = dict.fromkeys(variant.chunked for variant in variants if variant.chunked)
    for name in names:
        print(f"\n{name}: times of {'the products, and peak MiB' if memory else 'the products'}, by rows of a chunk\n")
        lines = []
        for shape in shapes:
            cells = [str(shape)]
            for rows in chunk_rows:
                result = found[linear_cases.by_chunks(name, rows), shape]
                text = result.status if result.ratio is None else report.figure(result, "ratio", 3)
                cells.append(f"{text}, {result.peak_mib:.0f}" if result.peak_mib is not None else text)
            lines.append(cells)
        print(report.as_markdown((["", *map(str, chunk_rows)], lines), ends_with_text=False), flush=True)
