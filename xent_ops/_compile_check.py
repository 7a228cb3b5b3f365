"""A small loss and its gradient under torch.compile, on one device: ``python -m xent_ops._compile_check DEVICE``.

``check`` starts it in a process with empty caches. With full caches a missing compiler would not be noticed, and a
crash of the compiler must not end the calling process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

import torch

_MODULE = ["-m", "xent_ops._compile_check"]
TIMEOUT = 600  # seconds; two busy cores took 50

# The first of these that the error text contains is the cause.
_CAUSES = (
    (
        r"No working C\+\+ compiler found",
        "torch.compile finds no C++ compiler: {compiler}. Install one (Debian: apt-get install g++; Fedora: dnf "
        "install gcc-c++), or set CXX to one that is there",
    ),
    (
        r"Python\.h: No such file|'Python\.h' file not found",
        "Python's C headers are missing (Debian: apt-get install python3-dev; Fedora: dnf install python3-devel)",
    ),
    (
        r"omp\.h: No such file|'omp\.h' file not found|cannot find -lg?omp|unsupported option '-fopenmp'",
        "the C++ compiler has no OpenMP, which torch.compile asks for ({compiler})",
    ),
    (
        r"Failed to find C compiler",
        "Triton finds no C compiler, which builds its launchers: install gcc (Debian: apt-get install gcc), or set CC",
    ),
    (
        r"TritonMissing|Cannot find a working triton|No module named 'triton'",
        "torch.compile finds no Triton that works: install the triton that belongs to this build of torch",
    ),
    (
        r"lib(ascend|hccl|acl)\w*\.so[^:]*: cannot open shared object",
        "CANN is not found: install it, and source its set_env.sh in this shell",
    ),
    (r"C\+\+ compile error", "the C++ compiler refuses what torch.compile writes ({compiler})"),
)


def check(device: torch.device) -> str | None:
    """A description of the error of compiled code on this device, or None if there is no error."""
    with tempfile.TemporaryDirectory() as empty:
        variables = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor",
            "TRITON_CACHE_DIR": f"{empty}/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # Otherwise, with empty caches, Inductor tests vector instructions and precompiles headers for 30 seconds.
            "TORCHINDUCTOR_VEC_ISA_OK": "0",
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        }
        command = [sys.executable, *_MODULE, str(device)]
        try:
            done = subprocess.run(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return f"ERROR: it did not end in {TIMEOUT} s"
    return _explain(done.stdout, done.returncode) if done.returncode else None


def in_words(said: str) -> str | None:
    """The cause that this error text shows, if it is a known one."""
    for pattern, words in _CAUSES:
        if re.search(pattern, said):
            return words.format(compiler=_compiler())
    return None


def _explain(said: str, status: int) -> str:
    lines = said.splitlines()
    compiler_lines = [line for line in lines if "error: " in line]
    python_lines = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Missing)\b", line)]
    # A compiler's first error is the cause. In a chain of Python exceptions the last one is.
    excerpt = [*compiler_lines[:1], *python_lines[-1:], said.strip()[-300:]][0][:300]
    if words := in_words(said):
        return f"ERROR: {words}. It said: {excerpt}"
    return f"ERROR: the process died of signal {-status}" if status < 0 else f"ERROR: {excerpt}"


def _compiler() -> str:
    default = "clang++" if sys.platform == "darwin" else "g++"
    return f"CXX is {given}" if (given := os.environ.get("CXX")) else f"CXX is not set, and {default} is taken"


def _run(device: torch.device) -> None:
    """Raises the errors of torch.compile, or an AssertionError for a wrong number."""
    import xent_ops

    @torch.compile(fullgraph=True)
    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return xent_ops.cross_entropy(torch.tanh(x), target)  # the loss is an operator; Inductor has to compile tanh

    x = torch.linspace(-3, 3, 7 * 1003).view(1003, 7).T.contiguous()
    target = torch.arange(7) * 143
    target[2] = -100
    exact = x.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(torch.tanh(exact), target)
    expected.backward()
    x = x.to(device).requires_grad_()
    loss = step(x, target.to(device))
    loss.backward()
    assert x.grad is not None and exact.grad is not None
    for value, right in ((loss, expected), (x.grad, exact.grad)):
        torch.testing.assert_close(value.cpu().double(), right, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    _run(torch.device(sys.argv[1]))
