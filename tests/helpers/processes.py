"""Programs and tests in a fresh process."""

import os
import subprocess
import sys
import textwrap

PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # for ninja of this environment


def run_python(program, **environment):
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", **environment}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def run_cases(file, **environment):
    """The tests of a file, all of which pass; without conftest.py, which under TRITON_INTERPRET=1 puts the CUDA
    kernels in the CPU's place."""
    options = ["-q", "--noconftest", "--show-capture=no", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, file]
    env = {
        **os.environ,
        "PATH": PATH,
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
    }
    done = subprocess.run(command, env=env, cwd=file.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
