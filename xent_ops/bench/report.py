"""The output of a run: markdown tables on stdout, JSON for machines, a comparison with an earlier run, a picture."""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _environment
from .contestants import Peer
from .measure import Result


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def figure(result: Result, name: str, digits: int) -> str:
    """A field of the result as text, with ``~`` before an unsteady one."""
    return ("~" if name in result.unsteady else "") + number(getattr(result, name), digits)


def status(result: Result) -> str:
    text = result.status.upper()
    if result.status == "ok":
        text = "ok, in a graph" if result.mode == "graph" else "ok"
    return f"{text}: {result.note}" if result.note else text


def show(title: str, results: Sequence[Result], unit: tuple[int, str]) -> None:
    """Print a table. ``unit``: the unit of memory, and its name."""
    names = list(dict.fromkeys(name for result in results for name in result.errors))
    more = list(dict.fromkeys(name for result in results for name in result.more))
    memory = any(result.peak_bytes is not None for result in results)
    size, memory_unit = unit
    head = ["variant", "ms", "ratio", *more]
    head += [f"peak, {memory_unit}", f"less gradients, {memory_unit}"] * memory
    head += [*(f"error of {name}" for name in names), "status"]
    digits = 0 if memory_unit == "MiB" else 2
    rows = []
    for result in results:
        row = [result.variant, figure(result, "ms", 4), figure(result, "ratio", 3)]
        row += [("~" if "ms" in result.unsteady else "") + number(result.more.get(name), 2) for name in more]
        peaks = (result.peak_bytes, result.extra_bytes)
        row += [number(None if peak is None else peak / size, digits) for peak in peaks] * memory
        row += [f"{result.errors[name]:.1e}" if name in result.errors else "-" for name in names]
        rows.append([*row, status(result)])
    print(f"{title}\n\n{as_markdown(head, rows)}")
    if any(result.unsteady for result in results):
        print("~ unsteady: half of the samples differ by more than half, or the machine was busy; measure it again\n")


def as_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table. The first and the last column are text; the others are numbers, aligned to the right."""
    last = len(head) - 1
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (head, *rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = [
        [
            cell if column == last else cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in cells
    ]
    rule = ["---" if column in (0, last) else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]]) + "\n"


def environment(device: torch.device, command_line: Sequence[str], peers: Sequence[Peer]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command_line),
        **_environment.versions(),
        "device": str(device),
        "cpu": _environment.cpu_name(),
        "threads": torch.get_num_threads(),
        "peers": {
            peer.name: None if peer.missing() else _environment.distribution_version(*peer.distributions)
            for peer in peers
        },
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
        found["l2_bytes"] = getattr(properties, "L2_cache_size", None)
    return found


def show_environment(found: Mapping[str, Any], busy: str | None, peers: Sequence[Peer]) -> None:
    if busy:
        print(f"THE MACHINE IS BUSY: {busy}. Every time below has a ~ and says little; measure again on an idle one.")
    where = found.get("gpu") or f"{found['cpu']}, {found['threads']} threads"
    names = ("torch", "triton", "driver")
    print(f"{where}; " + ", ".join(f"{name} {found[name] or 'not found'}" for name in names), end="")
    present = [f"{name} {version}" for name, version in found["peers"].items() if version]
    absent = [f"{peer.name} ({', '.join(missing)})" for peer in peers if (missing := peer.missing())]
    print(f"; peers: {', '.join(present) or 'none'}; not installed: {', '.join(absent) or 'none'}\n", flush=True)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write ``content`` if there is a path. Values without a JSON number (an infinite error) become strings."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        return str(value) if isinstance(value, float) and value - value != 0 else value

    if path is not None:
        path.write_text(json.dumps(clean(content), indent=2, allow_nan=False) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Read the file that ``--compare`` names.

    Raises:
    ValueError: there is no such file, or ``--json`` has not written it.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        _by_name(content), content["environment"].items(), content["settings"].items()
    except OSError as error:
        raise ValueError(f"--compare {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--compare {path}: not what --json writes ({error!r})") from error
    return content


def compare(before: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Print a table of this run's figures beside those of an earlier run."""
    old, new = _by_name(before), _by_name(content)
    print(f"Beside a run of {before['environment'].get('date', 'an unknown date')}")
    alike = ("device", "gpu", "cpu", "threads", "torch", "triton", "driver")
    for part, names in (("environment", alike), ("settings", sorted({*before["settings"], *content["settings"]}))):
        for name in names:
            was, now = (json.loads(json.dumps(run[part].get(name))) for run in (before, content))
            if was != now:
                print(f"  not measured alike: {name} was {was}, is {now}")
    head = ["variant", "before ms", "now ms", "now / before", "before MiB", "now MiB", "verdict"]
    rows = []
    for name in dict.fromkeys([*new, *old]):
        entries = old.get(name, {}), new.get(name, {})
        marks = ["~" * ("ms" in entry.get("unsteady", ())) for entry in entries]
        ms, peaks = ([entry.get(key) for entry in entries] for key in ("ms", "peak_bytes"))
        ratio = (ms[1] or 0.0) / ms[0] if ms[0] and ms[1] else None
        rows.append(
            [
                name,
                *(mark + number(value, 4) for mark, value in zip(marks, ms, strict=True)),
                max(marks) * bool(ratio) + number(ratio, 3),
                *(number(peak and peak / 2**20, 0) for peak in peaks),
                _verdict(*entries),
            ]
        )
    print(f"\n{as_markdown(head, rows)}", flush=True)


def _by_name(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {f"{entry['table']}: {entry['variant']}": entry for entry in content["results"]}


def _verdict(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Compare two steady figures by the middle halves of their samples: they differ if these do not overlap."""
    if not before or not now:
        return "new" if now else "not measured now"
    if before["status"] != "ok" or now["status"] != "ok":
        return f"was {before['status']}, is {now['status']}"
    if before["mode"] != now["mode"]:
        return f"was timed by {before['mode']}, is timed by {now['mode']}"
    if "ms" in [*before["unsteady"], *now["unsteady"]]:
        return "unsteady"
    if now["low_ms"] > before["high_ms"]:
        return "slower"
    return "faster" if now["high_ms"] < before["low_ms"] else "same"


def draw(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw bars. Each table is a row with times and memory side by side. An unsteady time is hatched."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    tables = list(dict.fromkeys(result.table for result in results))
    height = 1 + sum(0.6 + 0.3 * sum(result.table == table for result in results) for table in tables)
    picture, grid = plt.subplots(len(tables), 2, figsize=(12, height), layout="constrained", squeeze=False)
    for table, (times, memory) in zip(tables, grid, strict=True):
        shown = [result for result in results if result.table == table][::-1]
        names = [result.variant for result in shown]
        colours = [{"ours": "#0072b2", "torch": "#6e7781", "peer": "#d55e00"}[result.kind] for result in shown]
        bars = times.barh(names, [result.ms or 0 for result in shown], color=colours)
        for bar, result in zip(bars, shown, strict=True):
            bar.set(hatch="///" if result.unsteady else "", edgecolor="white")
        times.bar_label(bars, [figure(result, "ms", 4) for result in shown], padding=3)
        times.set_title(f"{table}, ms", fontsize=10)
        bars = memory.barh(names, [(result.peak_bytes or 0) / 2**20 for result in shown], color=colours)
        memory.bar_label(bars, fmt="%.0f", padding=3)
        memory.set_title("peak memory beyond the inputs, MiB", fontsize=10)
    picture.suptitle(title, fontsize=10)
    picture.savefig(path, dpi=150)
    plt.close(picture)
