"""What setup.py builds, and what it says where it cannot."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(tmp_path):
    """A copy of what pip needs: setuptools writes into the folder that it builds from."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc_meta", "xent_ops"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def wheel(checkout, *options, **environment):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *options, "--wheel-dir", "wheels", "."]
    return subprocess.run(
        command, cwd=checkout, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500
    )


@pytest.mark.slow
def test_without_cpp(checkout):
    done = wheel(checkout, "--no-build-isolation", XENT_OPS_BUILD_CPP="0", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    (made,) = checkout.glob("wheels/*.whl")
    assert made.name.endswith("py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_with_cpp(checkout):
    done = wheel(checkout, "--no-build-isolation", XENT_OPS_BUILD_CPP="1")
    assert done.returncode == 0, done.stderr
    (made,) = checkout.glob("wheels/*.whl")
    assert "-cp310-abi3-" in made.name
    assert {"xent_ops/_C.abi3.so", "xent_ops/libxent_ops.so"} <= set(zipfile.ZipFile(made).namelist())


@pytest.mark.slow
def test_without_compiler(checkout):
    done = wheel(checkout, "--no-build-isolation", XENT_OPS_BUILD_CPP="1", CXX="no-such-compiler")
    assert done.returncode != 0
    assert "there is no C++ compiler no-such-compiler" in done.stderr and "XENT_OPS_BUILD_CPP=0" in done.stderr
    assert "Traceback" not in done.stderr
