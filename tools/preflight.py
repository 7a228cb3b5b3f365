"""Says what this machine lacks before anything is installed: all of it at once, with the commands to run.

It must run on any Python, if only to say that it is too old: no f-strings and no annotations here.
"""

from __future__ import print_function

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile

OLDEST = (3, 10)

# What torch.compile builds for the CPU, in small: a C++20 shared library with OpenMP and Python's headers.
PROBE = """
#include <Python.h>
#include <omp.h>
#include <span>
int probe(std::span<int> values) { return omp_get_max_threads() + (int)values.size() + PY_MAJOR_VERSION; }
"""

# what is missing -> the package that has it; {python} is the interpreter's name, python3 or python3.12 say
DEBIAN = {"venv": "{python}-venv", "headers": "{python}-dev", "compiler": "g++"}
FEDORA = {"venv": "{python}", "headers": "{python}-devel", "compiler": "gcc-c++"}


def error_of(command):
    """What a command that failed printed; None where it succeeded."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return str(error)
    text = process.communicate()[0].decode("utf-8", "replace")
    return text.strip() if process.returncode else None


def build_error(compiler, include):
    """Why the compiler cannot build the probe; None where it can."""
    folder = tempfile.mkdtemp()
    try:
        source = os.path.join(folder, "probe.cpp")
        with open(source, "w") as file:
            file.write(PROBE)
        flags = ["-std=c++20", "-fopenmp", "-shared", "-fPIC", "-I" + include]
        return error_of([compiler, source, "-o", os.path.join(folder, "probe.so")] + flags)
    finally:
        shutil.rmtree(folder)


def missing():
    """(key into the names of packages, in words) for each thing that is missing."""
    if sys.version_info < OLDEST:
        text = "Python 3.10 or newer: %s is %d.%d; install one, then add PYTHON=python3.12, say, to make"
        yield None, text % ((sys.executable,) + sys.version_info[:2])
        return  # what else this interpreter lacks is of no interest
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        yield "venv", "Python's modules venv and ensurepip: %s" % error

    include = sysconfig.get_paths()["include"]
    has_headers = os.path.exists(os.path.join(include, "Python.h"))
    if not has_headers:
        yield "headers", "Python's C headers: there is no %s/Python.h" % include

    mac = sys.platform == "darwin"
    compiler = os.environ.get("CXX", "clang++" if mac else "g++")  # the one that torch.compile takes
    error = error_of([compiler, "--version"])
    if error is not None:
        yield "compiler", "a C++ compiler: %s; CXX=clang++, say, takes another" % error
    elif has_headers and not mac:  # Apple's clang has OpenMP behind other flags
        error = build_error(compiler, include)
        if error is not None:
            yield "compiler", "a C++ compiler with C++20 and OpenMP: %s says\n%s" % (compiler, error)


def main():
    found = list(missing())
    if not found:
        return 0
    python = os.path.basename(sys.executable or "python3")
    if not python.startswith("python3"):
        python = "python3"

    def packages(names):
        return " ".join(names[key].format(python=python) for key, _ in found)

    lines = ["This machine lacks"]
    lines += ["  - " + text.replace("\n", "\n    ") for _, text in found]
    if all(key for key, _ in found):
        lines += ["Debian, Ubuntu:  sudo apt-get install " + packages(DEBIAN)]
        lines += ["Fedora, RHEL:    sudo dnf install " + packages(FEDORA)]
    print("\n".join(lines), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
