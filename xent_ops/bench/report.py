"""The output of a run: markdown tables on stdout, JSON for machines, a comparison with an earlier run, a picture."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _environment
from .contestants import Contestant
from .measure import Result
from .problems import Setting


def cells(result: Result, memory_unit: tuple[int, str]) -> dict[str, str]:
    """A line of a table: text by column."""
    size, unit = memory_unit
    mark, digits = "~" * result.unsteady, 0 if unit == "MiB" else 2
    row = {"variant": result.variant, "ms": "-", "ratio": "-"}
    if result.ms is not None:
        row["ms"] = f"{mark}{result.ms:.4f}"
    if result.ratio is not None:
        row["ratio"] = f"{mark}{result.ratio:.3f}"
    row |= {name: f"{value:.3f}" for name, value in result.more.items()}
    if result.peak_bytes is not None and result.extra_bytes is not None:
        row[f"peak, {unit}"] = f"{result.peak_bytes / size:.{digits}f}"
        row[f"less gradients, {unit}"] = f"{result.extra_bytes / size:.{digits}f}"
    row |= {f"error of {name}": f"{error:.1e}" for name, (error, _) in result.errors.items()}
    status = "ok" + ", in a graph" * (result.mode == "graph") if result.status == "ok" else result.status.upper()
    return {**row, "status": "; ".join([status, *result.notes])}


def as_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of text by column; the first and the last column are text, the others numbers, with "-" for none.

    rich, which writes such tables, is no dependency of the package.
    """
    columns = [*dict.fromkeys(name for row in rows for name in row if name != "status"), "status"]
    lines = [columns, *([row.get(name, "-").replace("|", "\\|") for name in columns] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    lines.insert(1, ["---", *["---:"] * (len(columns) - 2), "---"])
    aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:]), line[-1]] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in aligned)


def show(title: str, results: Sequence[Result], memory_unit: tuple[int, str]) -> None:
    """Print a table. ``memory_unit``: its bytes and its name."""
    print(f"{title}\n\n{as_markdown([cells(result, memory_unit) for result in results])}")
    if any(result.unsteady for result in results):
        print("~ unsteady: half of the samples differ by more than half, or the machine was busy; measure it again\n")


def content(setting: Setting, command_line: Sequence[str], peers: Sequence[Contestant]) -> dict[str, Any]:
    """What the JSON says beside the results."""
    distributions = importlib.metadata.packages_distributions()

    def version(peer: Contestant) -> str:
        if missing := peer.missing():
            return f"not installed (no module {', '.join(missing)})"
        return _environment.distribution_version(*distributions.get(peer.needs[0], ())) or "of an unknown version"

    environment = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command_line),
        **_environment.versions(),
        "device": str(setting.device),
        "gpu": torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else None,
        "cpu": _environment.cpu_name(),
        "threads": torch.get_num_threads(),
        "peers": {peer.name: version(peer) for peer in peers},
    }
    settings = {"dtype": str(setting.dtype).removeprefix("torch."), "ignored": setting.ignored}
    return {"environment": environment, "settings": settings}


def show_environment(found: Mapping[str, Any], busy: str) -> None:
    if busy:
        print(f"THE MACHINE IS BUSY: {busy}. Every time below has a ~ and says little; measure again on an idle one.")
    versions = {name: found[name] or "not found" for name in ("torch", "triton", "driver")} | found["peers"]
    where = found["gpu"] or f"{found['cpu']}, {found['threads']} threads"
    print("; ".join([where, *(f"{name} {version}" for name, version in versions.items())]), end="\n\n", flush=True)


def write_json(path: Path, content: Mapping[str, Any], results: Iterable[Result]) -> None:
    entries = [dataclasses.asdict(result) for result in results]
    for entry in entries:  # JSON has no infinite number
        entry["errors"] = {name: (min(error, 1e300), limit) for name, (error, limit) in entry["errors"].items()}
    path.write_text(json.dumps({**content, "results": entries}, indent=2, allow_nan=False) + "\n")


class Before:
    """An earlier run, from the file that ``--compare`` names.

    Raises:
        ValueError: ``--json`` has not written it.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = json.loads(path.read_bytes())
            self.results = {(entry["table"], entry["variant"]): entry for entry in content["results"]}
            self.conditions = {**content["environment"], **content["settings"]}
        except OSError as error:
            raise ValueError(f"--compare {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--compare {path}: not what --json writes ({error!r})") from error

    def show_differences(self, content: Mapping[str, Any]) -> None:
        now = {**content["environment"], **content["settings"]}
        for name in sorted(now.keys() - {"date", "command", "peers"}):
            if self.conditions.get(name) != now[name]:
                print(f"not measured alike: {name} was {self.conditions.get(name)}, is {now[name]}")

    def add_to(self, results: Sequence[Result]) -> None:
        """Two times differ if the middle halves of their samples do not overlap."""
        for result in results:
            entry = self.results.get((result.table, result.variant))
            if entry is None or not entry["ms"] or not result.ms:
                continue
            result.more |= {"before, ms": entry["ms"], "now / before": result.ms / entry["ms"]}
            if entry["peak_bytes"] and result.peak_bytes:
                result.more["peak, now / before"] = result.peak_bytes / entry["peak_bytes"]
            result.unsteady |= bool(entry["unsteady"])
            apart = {"slower": result.low_ms > entry["high_ms"], "faster": result.high_ms < entry["low_ms"]}
            alike = not result.unsteady and result.mode == entry["mode"]
            result.notes += [word for word, holds in apart.items() if holds and alike]


def labels(values: Sequence[float]) -> list[str]:
    """Of the bars of one axis, with the same number of digits: 7.82 and 23.00, 1568 and 8."""
    digits = 0 if max(values) >= 100 else 2
    return [f"{value:.{digits}f}" for value in values]


def draw(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw bars. Each table is a row with times and memory side by side. An unsteady time is hatched."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    tables = list(dict.fromkeys(result.table for result in results))
    size = (12, len(tables) + 0.3 * len(results))
    figure, grid = plt.subplots(len(tables), 2, figsize=size, layout="constrained", squeeze=False)
    colours = {"ours": "#0072b2", "torch": "#6e7781", "unit": "#6e7781", "peer": "#d55e00"}
    for table, (times, memory) in zip(tables, grid, strict=True):
        of_table = [result for result in reversed(results) if result.table == table]
        peaks = [(result.peak_bytes or 0) / 2**20 for result in of_table]
        for result, peak, label in zip(of_table, peaks, labels(peaks), strict=True):
            style = {"color": colours[result.kind], "hatch": "///" * result.unsteady, "edgecolor": "white"}
            times.bar_label(times.barh(result.variant, result.ms or 0, **style), fmt="%.4f", padding=3)
            bar = memory.barh(result.variant, peak, color=style["color"])
            memory.bar_label(bar, [label], padding=3)
        for axes in (times, memory):
            axes.margins(x=0.25)  # for the figures behind the bars
        times.set_title(f"{table}, ms", fontsize=10)
        memory.set_title("peak memory beyond the inputs, MiB", fontsize=10)
    hatched = "\nhatched: unsteady times, marked by ~ in the tables" if any(one.unsteady for one in results) else ""
    figure.suptitle(title + hatched, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)
