"""``python -m xent_ops doctor``: the exit status and what it says."""

import os
import subprocess
import sys

import pytest
import torch

import xent_ops
from xent_ops import _doctor, _extension
from xent_ops.__main__ import main
from xent_ops.kernels import cpu
from xent_ops.ops import library

# A fresh process: Triton reads TRITON_INTERPRET when it is imported, and so do we.
SLOW_IMPORT = 300


def run(**environment):
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "xent_ops", "doctor"]
    return subprocess.run(
        command, env={**inherited, **environment}, capture_output=True, text=True, timeout=SLOW_IMPORT
    )


def test_healthy():
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.__version__ in done.stdout
    assert "TRITON_INTERPRET is not set" in done.stdout
    assert "float32: ok" in done.stdout and "bfloat16: ok" in done.stdout
    if _extension.MODULE.exists():
        assert "C++ (xent_ops._C" in done.stdout and str(_extension.LIBRARY) in done.stdout
    for label in ("CPU", "CUDA / ROCm", "NPU"):
        assert label in done.stdout
    assert done.stdout.rstrip().endswith("Everything is right.")


def test_interpreter_is_warned_of_loudly():
    done = run(TRITON_INTERPRET="1")
    assert "WARNING: TRITON_INTERPRET is set" in done.stdout and "A THOUSAND TIMES SLOWER" in done.stdout
    # On a GPU machine it is what is wrong; without a GPU it does no harm.
    assert done.returncode == int(torch.cuda.is_available())


@pytest.fixture
def doubled_gradient():
    """The CPU's backward kernel, replaced by one that is off by a factor."""

    def wrong(*args, **kwargs):
        meta = [
            arg.to(torch.float64) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args
        ]
        return (2 * library.OPERATORS["cross_entropy_backward"].on_reference(*meta, **kwargs)).to(args[2].dtype)

    with torch.library._scoped_library("xent", "IMPL") as override:
        override.impl("cross_entropy_backward", wrong, "CPU", allow_override=True)
        yield


def test_wrong_kernel(doubled_gradient, capsys):
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "float32: WRONG: grad" in out and "Something is wrong" in out
    assert "Everything is right" not in out


def test_raising_kernel(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(xent_ops, "cross_entropy", broken)
    assert main(["doctor"]) == 1
    assert "ERROR: RuntimeError: the driver is too old" in capsys.readouterr().out


def test_missing_triton_is_wrong_where_there_is_a_gpu(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(_doctor, "devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(_doctor, "check", lambda device, dtype: None)
    monkeypatch.setattr(_doctor, "_name", str)
    assert main(["doctor"]) == 1
    assert "install the triton that belongs" in capsys.readouterr().out


@pytest.fixture
def forget_extension():
    """Whether the extension serves the CPU is found out once a process."""
    yield cpu.problem.cache_clear()
    cpu.problem.cache_clear()


def test_stale_extension_is_wrong(forget_extension, monkeypatch, capsys):
    if cpu.problem() is not None:
        pytest.skip("built without C++ (XENT_OPS_BUILD_CPP=0)")
    cpu.problem.cache_clear()
    monkeypatch.setattr(_extension, "sources_hash", lambda: "0123456789abcdef")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "the slower one: the C++ extension was built from other sources" in out
    assert "libxent_ops.so was built from other sources" in out


def test_no_extension_is_said(forget_extension, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_extension, "MODULE", tmp_path / "_C.abi3.so")
    monkeypatch.setattr(_extension, "LIBRARY", tmp_path / "libxent_ops.so")
    assert main(["doctor"]) == 0
    assert "built without its C++ extension" in capsys.readouterr().out


@pytest.mark.gpu
def test_gpu_is_checked(capsys):
    assert main(["doctor"]) == 0
    assert "cuda:0" in capsys.readouterr().out
