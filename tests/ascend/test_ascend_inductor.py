"""Inductor-Ascend of the real torch_npu, on a stub of CANN, up to the code that it writes. None of it is run."""

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers.processes import run_cases

try:
    from triton.backends import backends
except ImportError:
    backends = {}
if "ascend" not in backends:
    pytest.skip("needs triton-ascend, in an environment of its own: `make test-ascend`", allow_module_level=True)

import cann_stub

PACKAGES = Path(sys.prefix) / "torch_npu"  # of tools/setup_ascend.py


def missing():
    """Why this cannot run here."""
    found = next(iter(metadata.distributions(name="torch_npu", path=[str(PACKAGES)])), None)
    if found is None:
        return f"torch_npu could not be installed into {PACKAGES}: `make clean` and `make test-ascend` try again"
    if found.version.split(".")[:2] != torch.__version__.split(".")[:2]:
        return f"torch_npu {found.version} is not for torch {torch.__version__}"
    tools = [tool for tool in ("cc", "nm") if shutil.which(tool) is None]
    return f"needs {', '.join(tools)}, to build the stub of CANN" if tools else None


REASON = missing()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("backend", ["default", "triton_experimental"])
def test_the_code_of_a_training_step(tmp_path, backend):
    cann_stub.build(tmp_path, PACKAGES / "torch_npu")
    run_cases(
        Path(__file__).parent / "npu_inductor_cases.py",
        LD_LIBRARY_PATH=before("LD_LIBRARY_PATH", tmp_path),
        PYTHONPATH=before("PYTHONPATH", PACKAGES),
        TORCHINDUCTOR_NPU_BACKEND=backend,
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCH_WARM_POOL="0",
        CI="",  # where it is set, Inductor refuses fallbacks for operators that it can decompose; torch_npu makes such
    )


def before(variable, folder):
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get(variable)])])
