"""Lists everything that this machine lacks, before anything is installed, with the commands to run.

It must run on any Python, to report an old one. So it has no f-strings and no annotations.
"""

from __future__ import print_function

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile

OLDEST = (3, 10)

# A small example of what torch.compile builds for the CPU: a C++20 shared library with OpenMP and Python's headers.
PROBE = """
#include <Python.h>
#include <omp.h>
#include <span>
int probe(std::span<int> values) { return omp_get_max_threads() + (int)values.size() + PY_MAJOR_VERSION; }
"""

# missing part -> package; {python} is the interpreter's name, for example python3.12
DEBIAN = {"venv": "{python}-venv", "headers": "{python}-dev", "compiler": "g++"}
FEDORA = {"venv": "{python}", "headers": "{python}-devel", "compiler": "gcc-c++"}


def error_of(command):
    """The output of a command that failed; None if it succeeded."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return str(error)
    text = process.communicate()[0].decode("utf-8", "replace")
    return text.strip() if process.returncode else None


def build_error(compiler, include):
    """The compiler's error for the probe; None if it builds."""
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
    """(key into the names of packages, description) for each missing part."""
    if sys.version_info < OLDEST:
        text = "Python 3.10 or newer: %s is %d.%d; install one, then add PYTHON=python3.12, say, to make"
        yield None, text % ((sys.executable,) + sys.version_info[:2])
        return  # other checks of this interpreter are pointless
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
    compiler = os.environ.get("CXX", "clang++" if mac else "g++")  # as torch.compile chooses it
    error = error_of([compiler, "--version"])
    if error is not None:
        yield "compiler", "a C++ compiler: %s; CXX=clang++, say, takes another" % error
    elif has_headers and not mac:  # Apple's clang needs other flags for OpenMP
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
