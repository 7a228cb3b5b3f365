"""Runs the command of ``python -m xent_ops``. _command_line.py parses the arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import _command_line, _doctor, _extension
from .bench import run as bench


def _library_path(arguments: argparse.Namespace) -> int:
    try:
        print(_extension.library_path())
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _command_line.parse(sys.argv[1:] if argv is None else argv)
    run = {"bench": bench.main, "doctor": _doctor.main, "library-path": _library_path}[arguments.command]
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
