"""``--compare FILE``: what was measured now beside what an earlier ``--json FILE`` holds: before a change and after."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import report

_Entry = Mapping[str, Any]  # a result, as JSON
_MEASURED_BY = ("device", "gpu", "cpu", "threads", "torch", "triton", "driver")


def load(path: Path) -> dict[str, Any]:
    """Raises:
    ValueError: there is no such file, or ``--json`` has not written it.
    """
    try:
        content = json.loads(path.read_bytes())
        _by_name(content), content["environment"].items(), content["settings"].items()
    except OSError as error:
        raise ValueError(f"--compare {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--compare {path}: not what --json writes ({error!r})") from error
    return content


def show(arguments: argparse.Namespace, content: Mapping[str, Any]) -> None:
    """``content`` is what ``--json`` writes of this run. Without ``--compare``, nothing."""
    if arguments.before is None:
        return
    before, now = _by_name(arguments.before), _by_name(content)
    print(f"Beside {arguments.compare}, of {arguments.before['environment'].get('date', 'an unknown date')}")
    for line in _differences(arguments.before, content):
        print(f"  not measured alike: {line}")
    memory = any(entry.get("peak_mib") is not None for entry in before.values())
    head = ["shape, variant", "before ms", "now ms", "now / before", *["before MiB", "now MiB"] * memory, "verdict"]
    rows = [_row(name, before.get(name), now.get(name), memory) for name in dict.fromkeys([*now, *before])]
    print(f"\n{report.as_markdown((head, rows))}", flush=True)


def _by_name(content: Mapping[str, Any]) -> dict[str, _Entry]:
    """Those that were measured, or tried."""
    named = [entry for entry in content["results"] if "variant" in entry]
    return {f"{'x'.join(map(str, entry['shape']))} {entry['variant']}": entry for entry in named}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for part, names in (("environment", _MEASURED_BY), ("settings", sorted({*before["settings"], *now["settings"]}))):
        for name in names:
            old, new = (json.loads(json.dumps(content[part].get(name))) for content in (before, now))
            if old != new:
                found.append(f"{name} was {old}, is {new}")
    return found


def _row(name: str, before: _Entry | None, now: _Entry | None, memory: bool) -> list[str]:
    old, new = before or {}, now or {}
    ratio = report.number(new["ms"] / old["ms"], 3) if old.get("ms") and new.get("ms") else "-"
    times = [("~" if _unsteady(entry) else "") + report.number(entry.get("ms"), 4) for entry in (old, new)]
    row = [name, *times, ("~" if _unsteady(old) or _unsteady(new) else "") + ratio]
    if memory:
        row += [report.number(entry.get("peak_mib"), 0) for entry in (old, new)]
    return [*row, _verdict(before, now)]


def _unsteady(entry: _Entry) -> bool:
    return "ms" in entry.get("unsteady", ())


def _verdict(before: _Entry | None, now: _Entry | None) -> str:
    """Of steady figures: are the middle halves of their samples apart?"""
    if before is None or now is None:
        return "new" if now else "not measured now"
    if before["status"] != "ok" or now["status"] != "ok":
        return f"was {before['status']}, is {now['status']}"
    if before["mode"] != now["mode"]:
        return f"was timed by {before['mode']}, is timed by {now['mode']}"
    if before.get("low_ms") is None:
        return "its spread was not written then"
    if _unsteady(before) or _unsteady(now):
        return "unsteady"
    if now["low_ms"] > before["high_ms"]:
        return "slower"
    return "faster" if now["high_ms"] < before["low_ms"] else "same"
