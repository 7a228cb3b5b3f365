"""``python -m xent_ops`` with bench, doctor or library-path: which command runs, and nothing else."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import _doctor, _extension
from ._version import __version__
from .bench import run as bench


def _library_path(arguments: argparse.Namespace) -> int:
    try:
        print(_extension.library_path())
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xent_ops", description="Tools of xent_ops.")
    parser.add_argument("--version", action="version", version=f"xent_ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in (("bench", bench), ("doctor", _doctor)):
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.main, parser=command)
    text = "path of libxent_ops.so: the operators for processes without Python"
    commands.add_parser("library-path", help=text, description=text).set_defaults(run=_library_path)
    arguments = parser.parse_args(argv)
    arguments.command_line = ["python", "-m", "xent_ops", *(sys.argv[1:] if argv is None else argv)]
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
