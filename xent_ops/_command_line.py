"""The arguments of ``python -m xent_ops``: bench, doctor or library-path.

This module does not import torch, which takes seconds. Python imports the package before its ``__main__``, and the
package imports this module first. So a process that runs ``python -m xent_ops`` parses the arguments here, and --help
or an error ends it at once. In every other process this module does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    import argparse

DOCTOR = "versions, which kernels serve which device and why, and a tiny loss on each device, eager and compiled"
LIBRARY_PATH = "path of libxent_ops.so: the operators for processes without Python"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """With ``command``, its ``parser`` and, for reports, the ``command_line``. --help and errors raise SystemExit."""
    import argparse  # here: ``import xent_ops`` alone does not need argparse

    from .bench import arguments as bench

    parser = argparse.ArgumentParser(prog="python -m xent_ops", description="Tools of xent_ops.")
    parser.add_argument("--version", action="version", version=f"xent_ops {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    added = {}
    for name, text in (("bench", bench.HELP), ("doctor", DOCTOR), ("library-path", LIBRARY_PATH)):
        added[name] = commands.add_parser(name, help=text, description=text)
        added[name].set_defaults(parser=added[name])
    bench.add_arguments(added["bench"])
    added["doctor"].add_argument(
        "--json", action="store_true", help="for a bug report: the same and torch's own, as JSON"
    )
    found, unknown = parser.parse_known_args(argv)
    if unknown:  # the command's parser reports it: parse_args would show the usage of the top parser, without options
        getattr(found, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if found.command is None:
        parser.print_help()
        parser.exit()
    found.command_line = ["python", "-m", "xent_ops", *argv]
    return found


def _runs_the_package() -> bool:
    """While Python looks for the module that ``-m`` names, sys.argv begins with "-m"; sys.orig_argv has the name."""
    argv = getattr(sys, "argv", [])
    return argv[:1] == ["-m"] and sys.orig_argv[-len(argv)].removeprefix("-m") == "xent_ops"


if _runs_the_package() and parse(sys.argv[1:]).command != "library-path":
    print("importing torch", file=sys.stderr, flush=True)
