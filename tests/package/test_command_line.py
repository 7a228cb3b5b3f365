"""``python -m xent_ops`` before it runs anything: help, refusals, and what of them needs torch."""

import re
import subprocess
import sys

import pytest

import xent_ops
from xent_ops import _command_line
from xent_ops.__main__ import main


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        ([], 0, "bench       time this package's loss"),
        (["--help"], 0, "library-path"),
        (["--version"], 0, f"xent_ops {xent_ops.__version__}"),
        (["bench", "--help"], 0, "--linear HIDDEN,..."),
        (["doctor", "-h"], 0, "usage: python -m xent_ops doctor"),
        (["bench", "--spahes", "34x64"], 2, "python -m xent_ops bench: error: unrecognized arguments: --spahes 34x64"),
        (["bench", "--shapes", "34"], 2, "'34' is not a shape"),
    ],
)
def test_help_and_refusals_come_before_torch(arguments, status, said):
    """The real command. -X importtime lists what it imports."""
    command = [sys.executable, "-X", "importtime", "-m", "xent_ops", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status and said in done.stdout + done.stderr
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "xent_ops" in imported or "xent_ops._command_line" in imported
    assert not {"torch", "numpy"} & imported


def test_a_misspelt_option_shows_the_usage_of_its_command(capsys):
    for argv, usage in (
        (["bench", "--spahes"], "usage: python -m xent_ops bench [-h] [--shapes"),
        (["doctor", "--jsn"], "usage: python -m xent_ops doctor [-h] [--json]"),
        (["library-path", "x"], "usage: python -m xent_ops library-path [-h]"),
        (["--verison"], "usage: python -m xent_ops [-h] [--version] COMMAND"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2 and capsys.readouterr().err.startswith(usage)


@pytest.mark.parametrize(
    "argv, original, expected",
    [
        (["-m", "--help"], ["python", "-m", "xent_ops", "--help"], True),
        (["-m"], ["python", "-W", "ignore", "-mxent_ops"], True),
        (["-m", "cpu"], ["python", "-m", "xent_ops._compile_check", "cpu"], False),
        (["-m", "-m", "xent_ops"], ["python", "-m", "pytest", "-m", "xent_ops"], False),  # found by a plugin
        (["-c", "xent_ops"], ["python", "-c", "import xent_ops", "xent_ops"], False),
        (["run.py"], ["python", "run.py"], False),
        ([], ["python"], False),
    ],
)
def test_only_the_command_reads_arguments_while_the_package_is_imported(argv, original, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert _command_line._runs_the_package() is expected
