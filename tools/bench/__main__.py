"""python -m tools.bench TABLE, from the root of the repository."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

from xent_ops.bench import run
from xent_ops.bench.arguments import add_common, positive, positives, shapes, writable_path

from . import divergences, heads, host, launches, lengths, losses, megatron, model, ranks, tokens, top_k, trainers

LOGITS, HEADS = "8192x32000,4096x128256", "8192x128256"
CHUNKS: dict[str, Any] = {"type": positives, "metavar": "ROWS,...", "help": "a line of ours for each size of chunks"}
DYNAMIC: dict[str, Any] = {"action": "store_true", "help": "also compiled for any number of rows"}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    commands = top.add_subparsers(dest="command", metavar="TABLE", required=True)

    def table(name: str, tables: run.Tables, text: str, sizes: str = "", hidden: str = "") -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text)
        add_common(parser)
        if sizes:
            parser.add_argument("--shapes", type=shapes, default=sizes, metavar="NxV,...", help="rows x classes")
        if hidden:
            parser.add_argument(
                "--hidden", type=positives, default=hidden, metavar="HIDDEN,...", help="features of a row"
            )
        parser.set_defaults(run=functools.partial(run.run, tables=tables), tables=tables, parser=parser)
        return parser

    table("losses", losses.losses, "all forms of the loss", LOGITS).add_argument("--dynamic", **DYNAMIC)
    found = table("steps", losses.steps, "a product, the loss and their backward", LOGITS, "1024")
    found.add_argument("--dynamic", **DYNAMIC)
    found = table("tails", losses.tails, "steps with softcap, scale and upcast before the loss", "8192x65536", "1024")
    found.set_defaults(dtype="bfloat16")
    found = table("heads", heads.heads, "all forms of head and loss as one", HEADS, "4096")
    found.add_argument("--chunk-rows", **CHUNKS)
    sizes = "1x128256,64x128256,8192x128256"
    table("invariant", heads.invariant, "batch_invariant=True beside the default", sizes, "4096")
    table("packages", heads.packages, "head and loss in an AOTInductor package", "8192x32000", "2048")
    found = table("tokens", tokens.tokens, "losses of tokens from hidden states", HEADS, "4096")
    found.add_argument("loss", choices=tokens.LOSSES, help="topk: a teacher's 64 most probable classes")
    found = table("top-k", top_k.tables, "the k most probable classes, from hidden states", "4096x128256", "4096")
    found.add_argument("--k", type=positives, default="20,256", metavar="K,...", help="so many classes of each row")
    found = table("distillation", tokens.distillation, "a teacher's distribution", HEADS, "2048")
    found.add_argument("--teacher", type=positive, default=4096, metavar="HIDDEN", help="features of the teacher")
    found.add_argument("--beta", type=float, default=0.0, help="of the divergence, 0 to 1 (default: 0, forward KL)")
    found.add_argument("--chunk-rows", **CHUNKS)
    found = table(
        "divergences", divergences.tables, "losses of draft models, beside their peers' formulas", HEADS, "2048"
    )
    found.add_argument("loss", choices=divergences.LOSSES, help="total variation; -log(overlap); KL and both blended")
    found.add_argument("--teacher", type=positive, default=4096, metavar="HIDDEN", help="features of the teacher")
    found.add_argument("--draft", type=positive, metavar="CLASSES", help="the student has so many of the classes")
    found = table("trainers", trainers.tables, "the heads of TRL, verl and Liger-Kernel beside ours", HEADS, "4096")
    found.add_argument("--student", type=positive, default=2048, metavar="HIDDEN", help="features of a student (2048)")
    found.add_argument(
        "--teacher", type=positive, default=4096, metavar="HIDDEN", help="features of its teacher (4096)"
    )
    found = table("model", model.tables, "whole training steps of a Llama of transformers")
    found.add_argument("sizes", type=model.sizes, nargs="?", default="", help=f"KEY=N,... of {', '.join(model.KEYS)}")
    found.set_defaults(eager=True)  # a step launches more than a graph is captured for
    text = "the most tokens of a training step of a Llama, by the memory of a card"
    found = commands.add_parser("lengths", help=text, description=lengths.__doc__)
    found.add_argument("sizes", type=model.sizes, nargs="?", default="", help=f"KEY=N,... of {', '.join(model.KEYS)}")
    found.add_argument("--classes", type=positives, default="128256,256000", metavar="CLASSES,...", help="a table each")
    found.add_argument("--memory", type=positives, default="24,80,140", metavar="GIB,...", help="cards (24,80,140)")
    found.add_argument("--seconds", type=positive, default=5, help="the longest step that is tried (5)")
    found.add_argument("--json", type=writable_path, metavar="FILE", help="write the tables")
    found.set_defaults(run=lengths.main, parser=found)
    found = table("ranks", ranks.losses, "the loss of a vocabulary split over ranks", HEADS)
    found.add_argument(
        "--alone", type=positive, metavar="RANKS", help="one process: a rank of so many, nothing is sent"
    )
    found.set_defaults(run=ranks.main)
    found = table("ranks-heads", ranks.heads, "the head and the loss over ranks", HEADS, "4096")
    found.add_argument("--chunk-rows", **CHUNKS)
    found.set_defaults(run=ranks.main, alone=None)
    found = table("megatron", megatron.tables, "the head and the loss of Megatron-Core, over ranks", HEADS, "4096")
    found.set_defaults(run=ranks.main, alone=None)
    table("host", host.tables, host.HELP).set_defaults(run=host.main, device="cpu", eager=True)
    found = commands.add_parser("launches", help=launches.HELP, description=launches.HELP)
    found.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if there is one")
    found.add_argument("--blocks", type=positive, default=15, help="blocks of 100 steps for the host's time (15)")
    found.set_defaults(run=launches.main)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(argv)
    arguments.command_line = ["python", "-m", "tools.bench", *argv]
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
