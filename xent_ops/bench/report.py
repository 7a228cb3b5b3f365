"""What a run shows: a progress bar on stderr, a table on stdout, JSON for machines."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _environment
from .cases import PEERS, Peer
from .measure import Result

Table = tuple[list[str], list[list[str]]]  # names of columns, lines
Step = Callable[[str], None]  # tells the bar what is being measured now; called once a variant

WIDTH = 132  # of a table that goes to a file or a pipe


def have(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Step]:
    """A bar by rich, on a terminal; elsewhere a line for each."""
    started = 0

    def line(name: str) -> None:
        nonlocal started
        started += 1
        print(f"{title}  {started}/{total}  {name}", file=sys.stderr, flush=True)

    if not have("rich"):
        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)  # stdout stays as it is: the table may go to a pipe
    if not console.is_terminal:
        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=total)

        def advance(name: str) -> None:
            nonlocal started
            bar.update(task, completed=started, description=f"{title}  {name}")
            started += 1

        yield advance


def say_if_unmeasured(memory: bool, device: torch.device) -> None:
    if not memory:
        print(f"peak memory is not measured on {device}: neither CUDA's allocator nor Linux counts it", file=sys.stderr)


def say_how_long(measurements: int, seconds: float) -> None:
    """On stderr, before the first."""
    total = measurements * seconds
    about = f"{total:.0f} s" if total < 100 else f"{total / 60:.0f} minutes"
    print(
        f"{measurements} measurements: about {about}, longer with larger shapes or budgets", file=sys.stderr, flush=True
    )


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def figure(result: Result, name: str, digits: int) -> str:
    """A field of the result; ``~`` before one that is unsteady."""
    return ("~" if name in result.unsteady else "") + number(getattr(result, name), digits)


def error_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def status(result: Result) -> str:
    text = result.status.upper()
    if result.status == "ok":
        text = "ok, in a graph" if result.mode == "graph" else "ok"
    return f"{text}: {result.note}" if result.note else text


def table(results: Sequence[Result], memory: bool) -> Table:
    wall = any(result.wall_ms is not None for result in results)
    head = ["variant", "ms", "copies"] + ["wall ms"] * wall + ["peak", "extra"] * memory
    of_head = any(result.head_error is not None for result in results)
    head += ["grad error", *["head error"] * of_head, "status"]
    rows = []
    for result in results:
        row = [result.variant, figure(result, "ms", 4), figure(result, "copies", 2)]
        row += [figure(result, "wall_ms", 4)] * wall
        row += [number(result.peak_logits, 2), number(result.extra_logits, 2)] * memory
        errors = [result.grad_error] + [result.head_error] * of_head
        row += [error_text(error) for error in errors]
        rows.append([*row, status(result)])
    return head, rows


def show(title: str, results: Sequence[Result], columns: Table, markdown: bool) -> None:
    """One line a result: by rich in colour; with ``markdown``, or without rich, as text that can be pasted."""
    head, rows = columns
    print(title)  # a line of its own: rich would wrap it at the width of the figures
    if markdown or not have("rich"):
        print(f"\n{as_markdown(columns)}")
    else:
        from rich.console import Console
        from rich.table import Table as RichTable

        shown = RichTable()
        for column, name in enumerate(head):
            text = column in (0, len(head) - 1)
            shown.add_column(name, justify="left" if text else "right", no_wrap=not text, overflow="fold")
        styles = {"ok": {"ours": "bold"}, "wrong": {}, "error": {}}
        for result, row in zip(results, rows, strict=True):
            style = styles[result.status].get(result.kind, "" if result.status == "ok" else "red")
            shown.add_row(*row, style=style)
        Console(width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False).print(shown)
    if any(result.unsteady for result in results):
        print(
            "~ unsteady: half of the samples differ by more than half, or the machine was busy; measure it again on an "
            "idle one"
        )
    print(flush=True)


def as_markdown(columns: Table, ends_with_text: bool = True) -> str:
    """The first column is text, and the last one too or not; the others are numbers, to the right."""
    head, rows = columns
    cells = [[cell.replace("|", "\\|") for cell in line] for line in [head, *rows]]
    text = {0, len(head) - 1} if ends_with_text else {0}
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(head))]
    if ends_with_text:
        widths[-1] = 0
    lines = [
        [cell.ljust(width) if column in text else cell.rjust(width) for column, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(line, widths, strict=True)) for line in cells)
    ]
    rule = ["---" if column in text else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]]) + "\n"


def environment(device: torch.device, command_line: Sequence[str], peers: Sequence[Peer] = PEERS) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command_line),
        **_environment.versions(),
        "device": str(device),
        "cpu": _environment.cpu_name(),
        "threads": torch.get_num_threads(),
        "peers": {
            peer.name: _environment.distribution_version(*peer.distributions) if peer.installed() else None
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


def show_environment(found: dict[str, Any], busy: str | None, peers: Sequence[Peer] = PEERS) -> None:
    if busy:
        print(f"THE MACHINE IS BUSY: {busy}. Every time below has a ~ and says little; measure again on an idle one.")
    where = found.get("gpu") or f"{found['cpu']}, {found['threads']} threads"
    names = ("torch", "triton", "driver")
    print(f"{where}; " + ", ".join(f"{name} {found[name] or 'not found'}" for name in names), end="")
    present = [f"{name} {version or '(version unknown)'}" for name, version in found["peers"].items() if version]
    absent = [peer.name for peer in peers if not peer.installed()]
    print(f"; peers: {', '.join(present) or 'none'}; not installed: {', '.join(absent) or 'none'}", flush=True)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Values that JSON has no number for (an infinite error) become strings. Without a path, nothing."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        return str(value) if isinstance(value, float) and value - value != 0 else value

    if path is not None:
        path.write_text(json.dumps(clean(content), indent=2, allow_nan=False) + "\n")
