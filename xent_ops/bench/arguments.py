"""The arguments of the command. --help and refusals come before torch is imported, so this file does not import it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HELP = "time this package's loss beside torch's and its peers' on your device; each is checked against float64 first"
DTYPES = ("float32", "bfloat16", "float16", "float64")


class Shape(NamedTuple):
    rows: int
    classes: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.classes}"


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


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positives(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def number(valid: Callable[[float], bool], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not valid(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


def add_common(parser: argparse.ArgumentParser) -> None:
    fraction = number(lambda value: 0 <= value < 1, "a fraction of the rows; expected 0 or more and less than 1")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, xpu (default: cuda where there is a GPU)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the logits (default: bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument(
        "--ignored", type=fraction, metavar="FRACTION", help="rows that are ignored, as 0.9 (default: every 17th)"
    )
    parser.add_argument("--only", metavar="WORDS,...", help="only lines whose names contain one of these")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: wall time of a call in a row of calls")
    parser.add_argument(
        "--budget", type=positive, metavar="MS", help="time of measuring a line (default: 2000 on a GPU, else 500)"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="a last table: beside what an earlier --json wrote"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and environment; after each table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw times and memory (needs matplotlib)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=shapes, metavar="NxV,...", help="rows x classes, as 8192x32000,4096x128256")
    parser.add_argument(
        "--linear", type=positives, metavar="HIDDEN,...", help="time head and loss as one, of these hidden sizes"
    )
    add_common(parser)
