"""examples/aoti_eval: what Python packs, a C++ program without Python runs, to the same numbers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xent_ops import _extension

EXAMPLE = Path(__file__).parents[2] / "examples" / "aoti_eval"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake"),
]


def run(*command, **environment):
    return subprocess.run(
        [str(part) for part in command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=500
    )


def numbers(text, name):
    return [float(number) for number in re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)]


def tolerance(library):
    """Convolutions on CUDA have 10 bits (TF32)."""
    return 2e-3 if library == "none" else 1e-5


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    build = tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (("cmake", "-S", EXAMPLE, "-B", build, prefix), ("cmake", "--build", build)):
        done = run(*command)
        if "cannot find the CUDA" in done.stderr:
            pytest.skip("this torch is a CUDA build, whose CMake files want CUDA's toolkit, and there is none")
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "aoti_eval"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def packed(request, tmp_path_factory, aoti_packages):
    """(library, folder of packages, what Python printed). Packages for CUDA need no library."""
    library = _extension.LIBRARY if request.param == "cpu" else "none"
    if request.param == "cpu" and not library.exists():
        pytest.skip("built without C++ (XENT_OPS_BUILD_CPP=0)")
    out = tmp_path_factory.mktemp("packages")
    done = run(sys.executable, EXAMPLE / "export.py", out, "--steps", "20", "--device", request.param)
    assert done.returncode == 0, done.stdout + done.stderr
    return library, out, done.stdout


def test_perplexity(program, packed):
    library, out, python = packed
    done = run(program, library, "score", out / "score.pt2", EXAMPLE / "export.py")
    assert done.returncode == 0, done.stderr
    (expected,) = numbers(python, "perplexity")
    assert numbers(done.stdout, "perplexity") == [pytest.approx(expected, rel=tolerance(library))]
    assert 1.0 < expected < 256.0


def test_training_step(program, packed):
    library, out, python = packed
    done = run(program, library, "train", out / "step.pt2", out / "parameters.pt", EXAMPLE / "export.py")
    assert done.returncode == 0, done.stderr
    losses = numbers(done.stdout, "loss")
    assert losses == pytest.approx(numbers(python, "loss"), rel=tolerance(library))
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_without_the_library(program, packed):
    library, out, _ = packed
    if library == "none":
        pytest.skip("packages for CUDA need no library")
    done = run(program, "none", "train", out / "step.pt2", out / "parameters.pt", EXAMPLE / "export.py")
    assert done.returncode == 1
    assert "Could not find schema for xent::cross_entropy_" in done.stderr
    assert "python -m xent_ops library-path" in done.stderr


def test_there_is_no_python_in_the_process(program):
    assert "libpython" not in run("ldd", program).stdout
