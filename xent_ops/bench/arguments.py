"""The arguments of the command. --help and refusals come before torch is imported, so this file does not import it."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import NamedTuple

HELP = "time this package's loss beside torch's and its peers' on your device; each is checked against float64 first"
DTYPES = ("float32", "bfloat16", "float16", "float64")


class Shape(NamedTuple):
    rows: int
    classes: int


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


# argparse refuses a text that raises ValueError here, as an invalid value of the function's name.


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def fraction(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise ValueError
    return float(text)


def writable_path(text: str) -> Path:
    """An error comes before the measurements, not after them."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError
    return path


def picture_path(text: str) -> Path:
    if not text.endswith((".png", ".pdf", ".svg")):
        raise ValueError
    return writable_path(text)


def add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", help="cpu, cuda, cuda:1, xpu (default: cuda where there is a GPU)")
    add("--dtype", choices=DTYPES, help="of the logits (default: bfloat16 on a GPU, float32 on a CPU)")
    add("--ignored", type=fraction, metavar="FRACTION", help="rows that are ignored, as 0.9 (default: every 17th)")
    add("--only", metavar="WORDS,...", help="the units, and lines whose names contain one of these")
    add("--eager", action="store_true", help="no CUDA graphs: wall time of a call in a row of calls")
    add("--budget", type=positive, metavar="MS", help="time of measuring a line (default: 2000 on a GPU, else 500)")
    add(
        "--compare",
        type=Path,
        metavar="FILE",
        help="more columns: times of an earlier --json, ratios of time and memory",
    )
    add("--json", type=writable_path, metavar="FILE", help="write results and environment; after each table")
    add("--plot", type=picture_path, metavar="FILE.png", help="draw times and memory (needs matplotlib)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=shapes, metavar="NxV,...", help="rows x classes, as 8192x32000,4096x128256")
    parser.add_argument(
        "--linear", type=positives, metavar="HIDDEN,...", help="time head and loss as one, of these hidden sizes"
    )
    add_common(parser)
