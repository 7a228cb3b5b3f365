"""``--model``: what the loss is worth in a whole training step, compiled, of a Llama-like decoder."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from . import cases, model_cases, plot, report
from .measure import Result, measure
from .model_cases import BODY, ModelVariant
from .model_problem import ModelProblem
from .series import Kind, Run
from .sizes import ModelShape, Sizes


class _Step(NamedTuple):
    sizes: Sizes
    batch: int
    tokens: int  # of a sequence

    def as_json(self) -> dict[str, int]:
        return {"batch": self.batch, "tokens": self.tokens, **self.sizes._asdict()}


DEFAULTS = {
    "cuda": _Step(Sizes(), 4, 4096),
    "cpu": _Step(Sizes(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=128, classes=512), 2, 32),
}


def check(arguments: argparse.Namespace, device: torch.device) -> _Step:
    names = ("shapes", "step", "tails", "linear", "dynamic", "graph")
    others = [f"--{name}" for name in names if getattr(arguments, name)]
    if others:
        raise ValueError(f"--model is a table of its own, timed by calls: leave out {', '.join(others)}")
    if arguments.dtype in ("float16", "float64"):
        raise ValueError(f"--dtype {arguments.dtype}: --model trains in bfloat16 or float32")
    default = DEFAULTS["cpu" if device.type == "cpu" else "cuda"]
    found: dict[str, int] = {**default.as_json(), **arguments.model}
    step = _Step(Sizes(*(found[name] for name in Sizes._fields)), found["batch"], found["tokens"])
    step.sizes.check()
    return step


def chosen(only: str | None, dtype: torch.dtype) -> list[ModelVariant]:
    known, missing = model_cases.variants(dtype)
    return cases.choose(known, only, model_cases.PEERS, missing)


def kind(run: Run, step: _Step, variants: Sequence[ModelVariant]) -> Kind:
    def measured(title: str, shape: ModelShape) -> Iterator[Result]:
        """One by one: each compiles first, for minutes."""
        ignored = run.arguments.ignored
        problem = ModelProblem(step.sizes, step.batch, step.tokens, run.dtype, run.device, ignored=ignored)
        run.content["parameters"] = sum(parameter.numel() for parameter in problem.parameters)
        with report.progress(f"{shape} {run.name}", 1 + len(variants)) as tell:
            tell("the eager step that all are compared with")
            problem.expected()
            done: dict[str, Result] = {}
            for variant in variants:
                tell(f"{variant.name}: compiles, is checked and timed")
                done[variant.name] = result = measure(problem, variant, None, run.settings)
                if result.ms:
                    result.tokens_per_s = 1e3 * problem.shape.rows / result.ms
                    result.unsteady += ["tokens_per_s"] * ("ms" in result.unsteady)
                    _set_head_ms(result, done.get(BODY), done.get(variant.against))
                yield result

    def shown(shape: ModelShape, done: Sequence[Result]) -> tuple[str, report.Table]:
        title = (
            f"whole step of {shape.batch} x {shape.tokens} tokens, {run.name}; {shape.layers} layers of "
            f"{shape.hidden}, {shape.classes} classes, {run.content['parameters']:,} parameters"
        )
        return title, _table(done, run.settings.memory)

    shape = ModelShape(step.batch, step.tokens, step.sizes.layers, step.sizes.hidden, step.sizes.classes)
    own = {"model": step.as_json()}
    # On an H100 at least 22 s each: nine were not done after 200 s.
    seconds = {"cpu": 4, "cuda": 30}
    return Kind(own, [shape], 1 + len(variants), measured, shown, figures, peers=model_cases.PEERS, seconds=seconds)


def _set_head_ms(result: Result, body: Result | None, against: Result | None) -> None:
    """The time of head and loss, which is a difference of two steps, and its ratio to that of another variant."""
    if result is body or result.ms is None or body is None or body.ms is None:
        return
    result.head_ms = result.ms - body.ms
    result.unsteady += ["head_ms"] * ("ms" in result.unsteady + body.unsteady)
    if against is not None and against.head_ms:
        result.ratio = result.head_ms / against.head_ms
        result.unsteady += ["ratio"] * ("head_ms" in result.unsteady + against.unsteady)
        ratio = f"head and loss {report.figure(result, 'ratio', 3)} x {against.variant}"
        result.note = "; ".join(filter(None, (result.note, ratio)))


def _table(results: Sequence[Result], memory: bool) -> report.Table:
    heads = any(result.head_ms is not None for result in results)
    head = ["variant", "ms", *["head + loss ms"] * heads, "tokens/s"] + ["peak MiB"] * memory
    head += ["loss", "grad error", "head error", "status"]
    rows = []
    for result in results:
        row = [result.variant, report.figure(result, "ms", 2)]
        row += [report.figure(result, "head_ms", 2)] * heads
        row += [report.figure(result, "tokens_per_s", 0)]
        row += [report.number(result.extra_mib, 0)] * memory
        checked = result.variant != BODY
        row += [report.number(result.loss, 4)]
        row += [report.error_text(error if checked else None) for error in (result.grad_error, result.head_error)]
        rows.append([*row, report.status(result)])
    return head, rows


def figures(results: Sequence[Result]) -> plot.Figures:
    """Whole steps, and a line at the body's: what is above it is the head's and the loss's."""
    body = next((result.ms for result in results if result.variant == BODY), None)
    return plot.Figures(
        "ms",
        "whole step, ms",
        "extra_mib",
        "peak memory beyond parameters and gradients, MiB",
        None if body is None else (body, f"the {BODY}"),
        "%.0f",
        "%.1f",
    )
