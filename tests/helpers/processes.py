"""Programs and tests in a fresh process."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # for ninja of this environment

# Imports torch, which takes seconds, and forks for each program.
_SERVER = """
import json, os, sys, traceback
import torch, torch.export, torch.testing

for line in sys.stdin:
    program, folder = json.loads(line)
    if (child := os.fork()) == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
        status = 1
        try:
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@functools.cache
def _server():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", _SERVER], env={**os.environ, "PYTHONHASHSEED": "7"}, **pipes)


def run_with_torch(program):
    """What a program prints, in a process that has torch and nothing else: for those that do not look at its import.
    Its hashes of strings are not those of this process."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps((textwrap.dedent(program), folder)), file=server.stdin, flush=True)
        status, (out, err) = server.stdout.readline(), (Path(folder, name) for name in ("out", "err"))
        assert status == "0\n", out.read_text() + err.read_text()
        return out.read_text()


def run_python(program, **environment):
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def run_cases(file, **environment):
    """The tests of a file, all of which pass; without conftest.py, which under TRITON_INTERPRET=1 puts the CUDA
    kernels in the CPU's place."""
    options = ["-q", "--noconftest", "--show-capture=no", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, file]
    env = {**os.environ, "PATH": PATH, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(command, env=env, cwd=file.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
