"""What every run of the command does: all variants on each shape, a table a shape, the files that were asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from . import cases, compare, plot, report, timing
from .measure import Result, Settings, measure, measure_interleaved, ours_failed, set_ratios
from .problems import Problem


class Kind(NamedTuple):
    """What losses and steps, ``--linear`` and ``--model`` differ in."""

    settings: dict[str, Any]  # as --json has them, beside those of all kinds
    shapes: Sequence[Any]
    variants: int  # on each shape
    measured: Callable[[str, Any], Iterable[Result]]  # of a title for the progress, and a shape
    shown: Callable[[Any, Sequence[Result]], tuple[str, report.Table]]  # a title, and the table below it
    figures: Callable[[Sequence[Result]], plot.Figures]
    drawn: Callable[[Sequence[Result]], Sequence[Result]] = lambda results: results
    conclude: Callable[[Sequence[Result]], None] = lambda results: None  # after the last table
    peers: Sequence[cases.Peer] = cases.PEERS
    # A measurement of the default shapes, compilation included: 2 cores of an EPYC, an H100 (2026-11-26).
    seconds: Mapping[str, float] = MappingProxyType({"cpu": 2, "cuda": 4})


@dataclass
class Run:
    arguments: argparse.Namespace
    settings: Settings
    dtype: torch.dtype
    device: torch.device
    content: dict[str, Any] = field(default_factory=dict)  # what --json writes

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def in_turn(
        self, title: str, problem: Problem, variants: Sequence[cases.Variant], copy: timing.Times | None
    ) -> list[Result]:
        done = []
        with report.progress(title, len(variants)) as step:
            if self.settings.interleaved:
                done = measure_interleaved(problem, variants, self.settings, step)
            for variant in variants[len(done) :]:
                step(variant.name)
                done.append(measure(problem, variant, copy, self.settings))
        set_ratios(variants, done)
        return done

    def of(self, kind: Kind) -> int:
        """0, or 1 where a variant of this package is wrong or fails; peers' failures are their own."""
        arguments, content = self.arguments, self.content
        environment = report.environment(self.device, arguments.command_line, kind.peers)
        report.show_environment(environment, self.settings.busy, kind.peers)
        place = "cpu" if self.device.type == "cpu" else "cuda"
        report.say_how_long(len(kind.shapes) * kind.variants, kind.seconds[place])
        own = {"dtype": self.name, "step": None, **kind.settings, "ignored": arguments.ignored}
        content |= {"environment": environment, "settings": own | vars(self.settings), "results": []}
        results: list[Result] = []
        failed = False
        for number, shape in enumerate(kind.shapes, 1):
            done: list[Result] = []
            try:
                for result in kind.measured(f"{number}/{len(kind.shapes)} {shape}", shape):
                    done.append(result)
                    content["results"].append(result.as_json())
                    report.write_json(arguments.json, content)  # a run that is stopped leaves what it has
            except RuntimeError as error:  # out of memory, or a device that an earlier variant broke
                note = timing.reason(error)
                print(f"{shape}: not measured, {note}", file=sys.stderr)
                content["results"].append({"shape": list(shape), "status": "error", "note": note})
                report.write_json(arguments.json, content)
                failed = True
            if done:
                title, table = kind.shown(shape, done)
                report.show(title, done, table, arguments.markdown)
            results += done
            timing.collect(self.device)
        kind.conclude(results)
        compare.show(arguments, content)
        if arguments.plot and results:
            plot.draw(arguments.plot, kind.drawn(results), plot.title(environment, self.name), kind.figures(results))
        return int(failed or ours_failed(results))
