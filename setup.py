"""Builds csrc_meta against the torch of this environment: pip install --no-build-isolation --no-deps .

    xent_ops/_C.abi3.so       the CPU kernels, for Python
    xent_ops/libxent_ops.so   the operators, for processes without Python

Through torch's stable ABI one build serves torch 2.11 and newer, through Python's limited API every Python.
Without torch, as in the empty environment that `pip install .` builds in, both are left out with a warning; plain torch
then serves the CPU. XENT_OPS_BUILD_CPP=0 leaves them out without one, XENT_OPS_BUILD_CPP=1 makes the missing torch an
error. All else about the package is in pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
EXTENSION = runpy.run_path(str(ROOT / "xent_ops" / "_extension.py"))
OLDEST_TORCH = (2, 11)
OLDEST_PYTHON = (3, 10)

NO_TORCH = "there is no torch in the environment that builds, and pip builds in an empty one unless told otherwise"
INSTALL = "install torch and setuptools first, then run: pip install --no-build-isolation --no-deps ."
WITHOUT = "Or set XENT_OPS_BUILD_CPP=0 to build without C++: plain torch then serves CPU tensors."

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


def refuse(problem: str) -> NoReturn:
    sys.exit(f"\nxent_ops cannot build its C++ part: {problem}\n{WITHOUT}\n")


def find_torch() -> Path | None:
    """Where torch is installed; it is not imported, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def torch_root() -> Path:
    root = find_torch()
    if root is None:
        refuse(f"{NO_TORCH}: {INSTALL}")
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        refuse(f"torch {version} is too old; it needs {'.'.join(map(str, OLDEST_TORCH))} or newer.")
    return root


def write_schemas(folder: Path) -> None:
    """schemas.h: for each operator its name and its schema, from the one file that has them."""
    module = runpy.run_path(str(EXTENSION["SCHEMAS"]))
    lists: dict[str, list[str]] = {"XENT_OPERATORS": [], "XENT_COMPOSITES": []}
    for name, schema in module["SCHEMAS"].items():
        if name in module["PYTHON_ONLY"]:
            continue
        where = "XENT_COMPOSITES" if name in module["COMPOSITES"] else "XENT_OPERATORS"
        lists[where].append(f'  X({name}, "{name}{schema}")')
    lines = ["// Made by setup.py from xent_ops/ops/schemas.py.", "#pragma once"]
    for macro, entries in lists.items():
        lines += ["", " \\\n".join([f"#define {macro}(X)", *entries])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schemas.h").write_text("\n".join(lines) + "\n")


class BuildExtension(build_ext):
    """Compiles each source once, several at a time, and links it into both products."""

    def build_extensions(self) -> None:
        if os.name != "posix":
            refuse("this platform is not supported.")
        torch = torch_root()
        compiler = self.compiler.compiler_so_cxx[0]
        if shutil.which(compiler) is None:
            refuse(f"there is no C++ compiler {compiler}. Debian: apt-get install g++; CXX=clang++ takes another.")
        generated = Path(self.build_temp) / "generated"
        write_schemas(generated)
        self.include_dirs = [str(ROOT / "csrc_meta"), str(generated), str(torch / "include"), *self.include_dirs]
        self.torch_libraries = str(torch / "lib")
        self.mark = EXTENSION["mark"](EXTENSION["sources_hash"]())
        sources = sorted({source for extension in self.extensions for source in extension.sources})
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.objects = dict(zip(sources, pool.map(self.compile, sources), strict=True))
        super().build_extensions()

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
        self.compiler.link_shared_object(
            [self.objects[source] for source in extension.sources],
            self.get_ext_fullpath(extension.name),
            libraries=["torch_cpu"],
            library_dirs=[self.torch_libraries],
            # The dispatcher keeps pointers into the library for the life of the process.
            extra_postargs=["-Wl,-z,nodelete"] if sys.platform == "linux" else ["-undefined", "dynamic_lookup"],
            target_lang="c++",
        )

    def get_ext_filename(self, name: str) -> str:
        return super().get_ext_filename(name) if name.endswith("_C") else name.replace(".", os.sep) + ".so"


class BuildWithoutCpp(build_py):
    """Says what the wheel lacks. Here, because a build runs this command once and this file several times."""

    def run(self) -> None:
        super().run()
        warnings.warn(
            "xent_ops is built without its C++ part, which is the CPU kernels (slower plain torch serves CPU tensors) "
            f"and libxent_ops.so: {NO_TORCH}. To have them, {INSTALL}",
            stacklevel=1,
        )


def options() -> dict[str, Any]:
    wanted = os.environ.get("XENT_OPS_BUILD_CPP", "")
    if wanted == "0":
        return {}
    if wanted != "1" and find_torch() is None:
        return {"cmdclass": {"build_py": BuildWithoutCpp}}
    shared = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc_meta").rglob("*.cpp"))
    ends = {"xent_ops._C": "csrc_meta/python.cpp", "xent_ops.libxent_ops": "csrc_meta/library.cpp"}
    shared = [source for source in shared if source not in ends.values()]
    return {
        "ext_modules": [Extension(name, [*shared, end], py_limited_api=True) for name, end in ends.items()],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp{}{}".format(*OLDEST_PYTHON)}},
    }


setup(**options())
