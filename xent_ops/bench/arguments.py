"""The arguments of the command. Needs no torch: --help and refusals come before torch is imported."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from .sizes import Shape, Sizes

HELP = "time this package's loss beside torch's and its peers' on your device; each is checked against float64 first"
DTYPES = ("float32", "bfloat16", "float16", "float64")
TOKEN_LOSSES = ("grpo", "clip", "weights", "topk")
KEYS = ("batch", "tokens", *Sizes._fields)  # of --model


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


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _list(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def _model(text: str) -> dict[str, int]:
    """What is given; the defaults of the rest depend on the device."""
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        match = re.fullmatch(r"(\w+)=0*([1-9]\d*)", part)
        if match is None or match[1] not in KEYS:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a size; expected KEY=NUMBER with a whole number above 0, separated by commas, such "
                f"as layers=4,batch=16; keys are {', '.join(KEYS)}"
            )
        found[match[1]] = int(match[2])
    return found


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
        "--interleaved",
        action="store_true",
        help="with --linear: a sample of each variant in turn, for the same clock rates; holds the memory of all",
    )
    parser.add_argument(
        "--token-loss",
        choices=TOKEN_LOSSES,
        help="with --linear: a loss of tokens: GRPO with an entropy bonus, or without (clip), cross entropy with token "
        "weights, or with a teacher's 64 most probable classes and the rest of its probability",
    )
    parser.add_argument(
        "--distillation",
        type=_positive,
        metavar="TEACHER_HIDDEN",
        help="with --linear: distillation from a teacher of this hidden size",
    )
    parser.add_argument("--beta", type=_share, help="with --distillation: of its divergence (default: 0, forward KL)")
    parser.add_argument(
        "--model",
        type=_model,
        nargs="?",
        const="",
        metavar="KEY=N,...",
        help=f"time whole training steps of a Llama-like decoder; keys: {', '.join(KEYS)}",
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
