"""What setup.py builds, and what it says where it cannot."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

from xent_ops import _extension

ROOT = Path(__file__).parents[2]
WARNING = "xent_ops is built without the CPU kernels"


@pytest.fixture
def checkout(tmp_path):
    """A copy of what pip needs: setuptools writes into the folder that it builds from."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc_meta", "xent_ops"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def wheel(checkout, **environment):
    """pip wheel, with the torch and the setuptools of this environment."""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", "wheels", "."]
    done = subprocess.run(
        command, cwd=checkout, env=variables(**environment), capture_output=True, text=True, timeout=500
    )
    return done.returncode, done.stdout + done.stderr, list(checkout.glob("wheels/*.whl"))


def variables(**changes):
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XENT_OPS_BUILD_CPP")}
    return {**inherited, **changes}


def is_pure(wheel):
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    return wheel.name.endswith("-py3-none-any.whl") and not libraries


@pytest.mark.slow
def test_with_cpp(checkout):
    status, said, (made,) = wheel(checkout)
    assert status == 0, said
    assert "-cp310-abi3-" in made.name
    assert {"xent_ops/_C.abi3.so", "xent_ops/libxent_ops.so"} <= set(zipfile.ZipFile(made).namelist())
    assert WARNING not in said


@pytest.mark.slow
def test_without_cpp(checkout):
    status, said, (made,) = wheel(checkout, XENT_OPS_BUILD_CPP="0", CXX="no-such-compiler")
    assert status == 0 and is_pure(made), said
    assert WARNING not in said


@pytest.fixture
def old_compiler(tmp_path):
    """One that knows no C++20."""
    path = tmp_path / "old-compiler"
    path.write_text("#!/bin/sh\necho unrecognized option -std=c++20 >&2\nexit 1\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["none", "old"])
def test_a_compiler_that_is_missing(checkout, compiler, old_compiler):
    """The pure wheel with one warning; with XENT_OPS_BUILD_CPP=1 an error."""
    path, words = {
        "none": ("no-such-compiler", "there is no C++ compiler no-such-compiler. Debian: apt-get install g++"),
        "old": (old_compiler, "old-compiler cannot build a C++20 library. It says:\n  unrecognized option -std=c++20"),
    }[compiler]
    status, said, (made,) = wheel(checkout, CXX=path)
    assert status == 0 and is_pure(made), said
    assert said.count(WARNING) == 1 and words in said
    made.unlink()
    status, said, made = wheel(checkout, CXX=path, XENT_OPS_BUILD_CPP="1")
    assert status != 0 and not made
    assert words in said and "XENT_OPS_BUILD_CPP=0 builds" in said and "Traceback" not in said


@pytest.mark.slow
def test_sources_that_do_not_compile_are_an_error(checkout):
    """The machine has all that is needed: the mistake is ours, and to be seen."""
    with (checkout / "csrc_meta" / "checks.cpp").open("a") as source:
        source.write("#error a mistake of ours\n")
    status, said, made = wheel(checkout)
    assert status != 0 and not made
    assert "a mistake of ours" in said and "cannot build its C++ part: what the compiler says" in said


# What pip calls, in a process that has setuptools and nothing else.
HOOKS = """
import sys, sysconfig
sys.path[:0] = [{site!r}, {checkout!r}]
import importlib.util
assert importlib.util.find_spec("torch") is None
{before}
from setuptools import build_meta
build_meta.get_requires_for_build_wheel()
build_meta.prepare_metadata_for_build_wheel("metadata")
build_meta.{hook}("wheels")
"""

# A torch to build with; whether anything is built with it is not asked.
TORCH = """
from pathlib import Path
Path("torch").mkdir()
Path("torch/__init__.py").touch()
info = Path("torch-{version}.dist-info")
info.mkdir()
(info / "METADATA").write_text("Metadata-Version: 2.1\\nName: torch\\nVersion: {version}\\n")
"""


def build_in_isolation(checkout, site, hook="build_wheel", before="", **environment):
    site.mkdir()
    for package in Path(setuptools.__file__).parent.parent.iterdir():
        if package.name.startswith(("setuptools", "pkg_resources", "_distutils_hack", "packaging", "wheel")):
            (site / package.name).symlink_to(package)
    for folder in ("metadata", "wheels"):
        (checkout / folder).mkdir()
    program = HOOKS.format(site=str(site), checkout=str(checkout), hook=hook, before=before)
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=checkout,
        env=variables(**environment),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr, list(checkout.glob("wheels/*.whl"))


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_without_torch(checkout, tmp_path_factory, hook):
    """As `pip install .` builds, and `pip install git+...`: a pure wheel, and one warning that says what it lacks."""
    status, said, (made,) = build_in_isolation(checkout, tmp_path_factory.mktemp("isolated") / "site", hook)
    assert status == 0 and is_pure(made), said
    assert hook == "build_editable" or "xent_ops/ops/schemas.py" in zipfile.ZipFile(made).namelist()
    (warning,) = [line for line in said.splitlines() if WARNING in line]
    for part in ("libxent_ops.so", "GPUs lose nothing", "no torch", "install torch", "--no-build-isolation"):
        assert part in warning


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, words",
    [
        (TORCH.format(version="2.10.1"), "torch 2.10.1 is too old; it needs 2.11 or newer"),
        (
            TORCH.format(version="2.13.0") + "sysconfig.get_path = lambda name: '/no-headers'",
            "there is no /no-headers/Python.h. Debian: apt-get install python3-dev",
        ),
    ],
    ids=["old torch", "headers"],
)
def test_what_else_may_be_missing(checkout, tmp_path_factory, before, words):
    status, said, made = build_in_isolation(
        checkout, tmp_path_factory.mktemp("isolated") / "site", before=before, CXX=sys.executable
    )
    assert status == 0 and is_pure(made[0]), said
    assert said.count(WARNING) == 1 and words in said


@pytest.mark.slow
def test_old_setuptools_are_refused_by_name(checkout, tmp_path_factory):
    """Those of an environment of Python 3.11. Their own error is about the license in pyproject.toml."""
    before = "import setuptools; setuptools.__version__ = '65.5.0'"
    status, said, made = build_in_isolation(checkout, tmp_path_factory.mktemp("isolated") / "site", before=before)
    assert status != 0 and not made
    assert "setuptools 65.5.0 cannot build xent_ops" in said and "pip install 'setuptools>=77'" in said
    assert f'requires = ["{_extension.OLDEST_SETUPTOOLS}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_without_torch_but_asked_for_cpp(checkout, tmp_path_factory):
    site = tmp_path_factory.mktemp("isolated") / "site"
    status, said, made = build_in_isolation(checkout, site, XENT_OPS_BUILD_CPP="1")
    assert status != 0 and not made
    assert "cannot build its C++ part: there is no torch" in said and "--no-build-isolation" in said


@pytest.mark.slow
def test_without_torch_and_not_asked_for_cpp(checkout, tmp_path_factory):
    site = tmp_path_factory.mktemp("isolated") / "site"
    status, said, (made,) = build_in_isolation(checkout, site, XENT_OPS_BUILD_CPP="0")
    assert status == 0 and is_pure(made), said
    assert "C++" not in said


def test_a_word_that_the_variable_does_not_know(checkout, tmp_path_factory):
    site = tmp_path_factory.mktemp("isolated") / "site"
    status, said, made = build_in_isolation(checkout, site, XENT_OPS_BUILD_CPP="yes")
    assert status != 0 and not made and "XENT_OPS_BUILD_CPP=yes is not known: 0 is without C++" in said
