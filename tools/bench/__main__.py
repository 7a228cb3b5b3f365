"""python -m tools.bench TABLE, from the root of the repository."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from xent_ops.bench import run
from xent_ops.bench.arguments import add_common, number, positive, positives, shapes

from . import heads, host, losses, model, ranks, tokens

share = number(lambda value: 0 <= value <= 1, "a number from 0 to 1")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    commands = top.add_subparsers(dest="command", metavar="TABLE", required=True)

    def add(name: str, tables: run.Tables, text: str, sizes: str = "") -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text)
        add_common(parser)
        if sizes:
            parser.add_argument("--shapes", type=shapes, default=sizes, metavar="NxV,...", help="rows x classes")
        parser.set_defaults(run=functools.partial(run.run, tables=tables), tables=tables, parser=parser)
        return parser

    def add_hidden(parser: argparse.ArgumentParser, default: str) -> None:
        parser.add_argument("--hidden", type=positives, default=default, metavar="HIDDEN,...", help="features of a row")

    found = add("losses", losses.losses, "all forms of the loss", "8192x32000,4096x128256")
    found.add_argument("--dynamic", action="store_true", help="also compiled for any number of rows")
    found = add("steps", losses.steps, "a product, the loss and their backward", "8192x32000,4096x128256")
    add_hidden(found, "1024")
    found.add_argument("--dynamic", action="store_true", help="also compiled for any number of rows")
    found = add("tails", losses.tails, "steps with softcap, scale and upcast before the loss", "8192x65536")
    add_hidden(found, "1024")
    found.set_defaults(dtype="bfloat16")

    found = add("heads", heads.heads, "all forms of head and loss as one", "8192x128256")
    add_hidden(found, "4096")
    found.add_argument(
        "--chunk-rows", type=positives, metavar="ROWS,...", help="a line of ours for each size of chunks"
    )
    found = add(
        "invariant", heads.invariant, "batch_invariant=True beside the default", "1x128256,64x128256,8192x128256"
    )
    add_hidden(found, "4096")
    found = add("packages", heads.packages, "head and loss in an AOTInductor package", "8192x32000")
    add_hidden(found, "2048")
    found = add("tokens", tokens.tokens, "losses of tokens from hidden states", "8192x128256")
    found.add_argument("loss", choices=(*tokens.LOSSES, "topk"), help="topk: a teacher's 64 most probable classes")
    add_hidden(found, "4096")
    found = add("distillation", tokens.distillation, "a teacher's distribution", "8192x128256")
    add_hidden(found, "2048")
    found.add_argument("--teacher", type=positive, default=4096, metavar="HIDDEN", help="features of the teacher")
    found.add_argument("--beta", type=share, default=0.0, help="of the divergence (default: 0, forward KL)")

    found = add("model", model.tables, "whole training steps of a Llama of transformers")
    found.add_argument("sizes", type=model.sizes, nargs="?", default="", help=f"KEY=N,... of {', '.join(model.KEYS)}")
    found.set_defaults(eager=True)  # a step launches more than a graph is captured for
    found = add("ranks", ranks.losses, "the loss of a vocabulary split over ranks", "8192x128256")
    found.add_argument(
        "--alone", type=positive, metavar="RANKS", help="one process: a rank of so many, nothing is sent"
    )
    found.set_defaults(run=ranks.main)
    found = add("ranks-heads", ranks.heads, "the head and the loss over ranks", "8192x128256")
    add_hidden(found, "4096")
    found.add_argument(
        "--chunk-rows", type=positives, metavar="ROWS,...", help="a line of ours for each size of chunks"
    )
    found.set_defaults(run=ranks.main)
    found = commands.add_parser("host", help=host.HELP, description=host.HELP)
    found.set_defaults(run=host.run, parser=found)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(argv)
    arguments.command_line = ["python", "-m", "tools.bench", *argv]
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
