"""``make demo``, with a small model and text, as it runs where nobody looks: not on a terminal."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_tells_its_progress_and_draws_three_losses(tmp_path):
    for package in ("matplotlib", "rich", "tokenizers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    picture = tmp_path / "demo.png"
    sizes = ["--device", "cpu", "--steps", "20", "--batch", "2", "--length", "16", "--width", "32", "--layers", "1"]
    command = [
        sys.executable,
        ROOT / "examples" / "train_lm.py",
        *sizes,
        "--data",
        ROOT / "xent_ops",
        "--plot",
        picture,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^ *\d+ s, (\d+)/60: (\w+)", done.stdout, re.MULTILINE)
    assert lines == [("0", "compiling"), ("10", "compiling"), ("20", "compiling"), ("30", "training")]
    (breaks,) = (line for line in done.stdout.splitlines() if "graph breaks" in line)
    assert re.findall(r"\d+", breaks) == ["0", "0", "0"]
    assert len(re.findall(r"[\d,]+ MiB", done.stdout)) == 3 or sys.platform != "linux"
    assert all(float(value) < 1e-3 for value in re.findall(r"\d\.\de[-+]\d\d", done.stdout))
    assert picture.read_bytes().startswith(b"\x89PNG")
