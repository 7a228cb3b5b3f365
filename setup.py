"""Builds csrc_meta against the torch of this environment: pip install --no-build-isolation --no-deps .

    xent_ops/_C.abi3.so       the CPU kernels, for Python
    xent_ops/libxent_ops.so   the operators, for processes without Python

Through torch's stable ABI one build serves torch 2.11 and newer, through Python's limited API every Python.
Where torch or a compiler is missing, both are left out with one warning, and the wheel is pure Python. `pip install .`
builds so: its environment for the build is empty. XENT_OPS_BUILD_CPP=0 leaves them out without a warning,
XENT_OPS_BUILD_CPP=1 makes whatever is missing an error. All else about the package is in pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).resolve().parent
EXTENSION = runpy.run_path(str(ROOT / "xent_ops" / "_extension.py"))
OLDEST_TORCH = (2, 11)
OLDEST_PYTHON = (3, 10)

COST = (
    "without the CPU kernels (plain torch then serves CPU tensors, more slowly; GPUs lose nothing) and without "
    "libxent_ops.so, the operators for processes without Python"
)
OLDEST_SETUPTOOLS = EXTENSION["OLDEST_SETUPTOOLS"]
INSTALL = f"run: pip install torch '{OLDEST_SETUPTOOLS}' && pip install --no-build-isolation --no-deps ."

FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fvisibility=hidden",  # two libraries in one process must not see each other's kernels
    "-fvisibility-inlines-hidden",
    "-Wall",
    f"-DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000",
    f"-DPy_LIMITED_API=0x{OLDEST_PYTHON[0]:02x}{OLDEST_PYTHON[1]:02x}0000",
]


# All that the sources ask of a compiler and Python's headers, in less than a second.
PROBE = """
#include <Python.h>
#include <span>
int probe(std::span<int> values) { return static_cast<int>(values.size()) + PY_MAJOR_VERSION; }
"""


def refuse(why: str) -> NoReturn:
    sys.exit(f"\nxent_ops cannot build its C++ part: {why}\nXENT_OPS_BUILD_CPP=0 builds {COST}.\n")


def find_torch() -> Path | None:
    """Where torch is installed; it is not imported, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def missing() -> str | None:
    """What the C++ part cannot be built without, and how to get it; None where nothing is missing."""
    if os.name != "posix":
        return "it is built on Linux and macOS alone."
    if find_torch() is None:
        empty = "there is no torch in the environment that builds, and pip builds in an empty one unless told otherwise"
        return f"{empty}. To have it, {INSTALL}"
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        return f"torch {version} is too old; it needs {'.'.join(map(str, OLDEST_TORCH))} or newer."
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")  # as setuptools chooses
    if shutil.which(compiler[0]) is None:
        return f"there is no C++ compiler {compiler[0]}. Debian: apt-get install g++; CXX=clang++ takes another."
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        return f"Python's C headers are missing: there is no {include}/Python.h. Debian: apt-get install python3-dev."
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(PROBE)
        command = [*compiler, *FLAGS, "-shared", "-fPIC", f"-I{include}", str(source), "-o", f"{folder}/probe.so"]
        done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stderr or done.stdout).strip()
    return f"{compiler[0]} cannot build a C++20 library. It says:\n{said}" if done.returncode else None


def write_schemas(folder: Path) -> None:
    """schemas.h: the schema of each operator, from the one file that has them."""
    module = runpy.run_path(str(EXTENSION["SCHEMAS"]))
    schemas = [
        f'  "{name}{schema}",' for name, schema in module["SCHEMAS"].items() if name not in module["PYTHON_ONLY"]
    ]
    start = "// Made by setup.py from xent_ops/ops/schemas.py.\n#pragma once\n\nnamespace xent {\n"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{start}inline constexpr const char* SCHEMAS[] = {{", *schemas, "};", "}  // namespace xent"]
    (folder / "schemas.h").write_text("\n".join(lines) + "\n")


class BuildExtension(build_ext):
    """Compiles each source once, several at a time, and links it into both products."""

    def build_extensions(self) -> None:
        if why := missing():
            refuse(why)
        torch = find_torch()
        assert torch is not None
        generated = Path(self.build_temp) / "generated"
        write_schemas(generated)
        self.include_dirs = [str(ROOT / "csrc_meta"), str(generated), str(torch / "include"), *self.include_dirs]
        self.torch_libraries = str(torch / "lib")
        self.mark = EXTENSION["mark"](EXTENSION["sources_hash"]())
        sources = sorted({source for extension in self.extensions for source in extension.sources})
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                self.objects = dict(zip(sources, pool.map(self.compile, sources), strict=True))
            super().build_extensions()
        except (CompileError, LinkError):
            refuse("what the compiler says is above.")

    def compile(self, source: str) -> str:
        (made,) = self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            macros=[("XENT_OPS_SOURCES", f'"{self.mark}"')],
            include_dirs=self.include_dirs,
            extra_postargs=FLAGS,
        )
        return made

    def build_extension(self, extension: Extension) -> None:
        # The dispatcher keeps pointers into the library for the life of the process.
        link = ["-Wl,-z,nodelete"] if sys.platform == "linux" else ["-undefined", "dynamic_lookup"]
        if sys.platform == "linux" and not extension.name.endswith("_C"):  # _C has Python's symbols from the process
            link.append("-Wl,-z,defs")  # an operator without a kernel does not link, rather than not load
        self.compiler.link_shared_object(
            [self.objects[source] for source in extension.sources],
            self.get_ext_fullpath(extension.name),
            libraries=["torch_cpu"],
            library_dirs=[self.torch_libraries],
            extra_postargs=link,
            target_lang="c++",
        )

    def get_ext_filename(self, name: str) -> str:
        return super().get_ext_filename(name) if name.endswith("_C") else name.replace(".", os.sep) + ".so"


class BuildWithoutCpp(build_py):
    """Says what the wheel lacks. Here, because a build runs this command once and this file several times."""

    why: str | None

    def run(self) -> None:
        super().run()
        warnings.warn(f"xent_ops is built {COST}. {self.why}", stacklevel=1)


def options() -> dict[str, Any]:
    wanted = os.environ.get("XENT_OPS_BUILD_CPP", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"XENT_OPS_BUILD_CPP={wanted} is not known: 0 is without C++, 1 makes a missing part an error")
    if wanted == "0":
        return {}
    if wanted != "1" and (why := missing()):
        BuildWithoutCpp.why = f"The C++ part cannot be built: {why}"
        return {"cmdclass": {"build_py": BuildWithoutCpp}}
    shared = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc_meta").rglob("*.cpp"))
    ends = {"xent_ops._C": "csrc_meta/python.cpp", "xent_ops.libxent_ops": "csrc_meta/library.cpp"}
    shared = [source for source in shared if source not in ends.values()]
    return {
        "ext_modules": [Extension(name, [*shared, end], py_limited_api=True) for name, end in ends.items()],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp{}{}".format(*OLDEST_PYTHON)}},
    }


def refuse_old_setuptools() -> None:
    """What reads pyproject.toml would, in words that name neither setuptools nor its version."""
    if int(setuptools.__version__.split(".")[0]) < int(OLDEST_SETUPTOOLS.split("=")[1]):
        sys.exit(
            f"\nsetuptools {setuptools.__version__} cannot build xent_ops, which needs {OLDEST_SETUPTOOLS}, and "
            f"--no-build-isolation takes the one that is installed. Run: pip install '{OLDEST_SETUPTOOLS}'\n"
        )


refuse_old_setuptools()
setup(**options())
