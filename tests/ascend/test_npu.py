"""Ascend NPUs without one: dispatch, tracing, and the kernels' numbers in Triton's interpreter.

A device takes PrivateUse1 for its whole process, so the cases run in processes of their own. None of this is an NPU:
test_npu_device.py is for those.
"""

import shutil
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration
from helpers.processes import PATH, run_cases, run_with_torch

HERE = Path(__file__).parent


@pytest.mark.slow
def test_tracing_on_a_fake_device():
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} cannot set up a device in Python")
    run_cases(HERE / "npu_fake_cases.py", TRITON_INTERPRET="0")


@pytest.mark.slow  # a C++ build and the interpreter; the other run of `make test` has the kernels' numbers too
@pytest.mark.parametrize("name", ["npu_host_cases.py", "npu_memory_cases.py"])
def test_kernels_on_a_host_device(name):
    pytest.importorskip("triton", reason="triton is not installed")
    for tool in ("ninja", "c++"):
        if shutil.which(tool, path=PATH) is None:
            pytest.skip(f"needs {tool}, to build the host backend")
    run_cases(HERE / name, TRITON_INTERPRET="1")


REDISPATCH = """
    import sys, torch, xent_ops
    from xent_ops.ops import library

    def message():
        x, target = torch.randn(4, 9), torch.tensor([1, 2, 3, -100])
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
        try:
            torch.ops.xent.cross_entropy_forward.default.redispatch(key, x, target)
        except (ImportError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("no error")
"""


def test_without_triton_the_error_says_what_to_install():
    run_with_torch(
        REDISPATCH
        + """
    sys.modules["triton"] = None
    text = message()
    assert "no triton could be imported" in text and "pip install triton-ascend" in text, text
    """
    )


def test_a_triton_without_ascend_backend_is_refused():
    pytest.importorskip("triton", reason="triton is not installed")
    run_with_torch(
        REDISPATCH
        + """
    text = message()
    assert "no ascend backend (it has: " in text and "pip install triton-ascend" in text, text
    assert "nvidia" in text and "torch_npu" in text, text
    """
    )


def test_without_cann_the_error_names_its_script():
    """triton-ascend calls itself inactive then, as the backend for another missing device does."""
    pytest.importorskip("triton", reason="triton is not installed")
    run_with_torch(
        REDISPATCH
        + """
    from triton.backends import backends
    backends["ascend"] = backends["nvidia"]
    for other in [name for name in backends if name != "ascend"]:
        del backends[other]
    text = message()
    assert text.startswith("RuntimeError") and "ascend-toolkit/set_env.sh" in text and "0 active drivers" in text, text
    """
    )
