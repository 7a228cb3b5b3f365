"""What setup.py builds, and what it says where it cannot."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[2]


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


# What pip calls, in a process that has setuptools and nothing else.
HOOKS = """
import sys
sys.path[:0] = [{site!r}, {checkout!r}]
import importlib.util
assert importlib.util.find_spec("torch") is None
from setuptools import build_meta
build_meta.get_requires_for_build_wheel()
build_meta.prepare_metadata_for_build_wheel("metadata")
build_meta.{hook}("wheels")
"""


def build_without_torch(checkout, site, hook="build_wheel", **environment):
    site.mkdir()
    for package in Path(setuptools.__file__).parent.parent.iterdir():
        if package.name.startswith(("setuptools", "pkg_resources", "_distutils_hack", "packaging", "wheel")):
            (site / package.name).symlink_to(package)
    for folder in ("metadata", "wheels"):
        (checkout / folder).mkdir()
    program = HOOKS.format(site=str(site), checkout=str(checkout), hook=hook)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XENT_OPS_BUILD_CPP")}
    return subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=checkout,
        env={**variables, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_without_torch(checkout, tmp_path_factory, hook):
    """As `pip install .` builds, and `pip install git+...`: a pure wheel, and one warning that says what it lacks."""
    done = build_without_torch(checkout, tmp_path_factory.mktemp("isolated") / "site", hook)
    assert done.returncode == 0, done.stderr
    (made,) = checkout.glob("wheels/*.whl")
    assert made.name.endswith("py3-none-any.whl")
    names = zipfile.ZipFile(made).namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert hook == "build_editable" or "xent_ops/ops/schemas.py" in names
    output = done.stdout + done.stderr
    (warning,) = [line for line in output.splitlines() if "without its C++ part" in line]
    for part in ("CPU kernels", "libxent_ops.so", "no torch", "install torch", "--no-build-isolation"):
        assert part in warning


def test_without_torch_but_asked_for_cpp(checkout, tmp_path_factory):
    done = build_without_torch(checkout, tmp_path_factory.mktemp("isolated") / "site", XENT_OPS_BUILD_CPP="1")
    assert done.returncode != 0
    assert "cannot build its C++ part: there is no torch" in done.stderr and "--no-build-isolation" in done.stderr


def test_without_torch_and_not_asked_for_cpp(checkout, tmp_path_factory):
    done = build_without_torch(checkout, tmp_path_factory.mktemp("isolated") / "site", XENT_OPS_BUILD_CPP="0")
    assert done.returncode == 0, done.stderr
    assert "C++" not in done.stdout + done.stderr and list(checkout.glob("wheels/*-py3-none-any.whl"))


@pytest.mark.slow
def test_isolated(checkout):
    """pip itself, with an empty environment for the build; takes setuptools from the package index."""
    done = wheel(checkout, "-v", XENT_OPS_BUILD_CPP="")
    if "Could not find a version that satisfies the requirement setuptools" in done.stdout + done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    (made,) = checkout.glob("wheels/*.whl")
    assert made.name.endswith("py3-none-any.whl")
    assert (done.stdout + done.stderr).count("without its C++ part") == 1
