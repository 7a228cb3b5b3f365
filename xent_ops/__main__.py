"""``python -m xent_ops bench`` and ``python -m xent_ops doctor``: which command runs, and nothing else."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import _doctor
from .bench import run as bench


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xent_ops", description="Tools of xent_ops.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in (("bench", bench), ("doctor", _doctor)):
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.main, parser=command)
    arguments = parser.parse_args(argv)
    arguments.command_line = ["python", "-m", "xent_ops", *(sys.argv[1:] if argv is None else argv)]
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
