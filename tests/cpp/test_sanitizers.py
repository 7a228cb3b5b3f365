"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, without torch and without Python around them.

And what `make sanitize-gpu` says where it cannot run, and reads of compute-sanitizer's reports.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import sanitize_gpu
import torch

ROOT = Path(__file__).parents[2]
SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++20", "-O1", "-g", "-pthread", *SANITIZERS]
COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.slow
def test_no_wild_read_no_undefined_behaviour_same_bits(tmp_path):
    """Every kernel, for every instruction set of this processor, with different numbers of threads."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no C++ compiler {COMPILER}")
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}\n")
    compiled = subprocess.run([COMPILER, *FLAGS, empty, "-o", tmp_path / "empty"], capture_output=True, text=True)
    if compiled.returncode:
        pytest.skip(f"{COMPILER} has no sanitizers here: {compiled.stderr.strip()}")
    program = tmp_path / "kernels"
    sources = [ROOT / "tests" / "cpp" / "kernels_main.cpp", *(ROOT / "csrc_meta" / "cpu").glob("*.cpp")]
    subprocess.run([COMPILER, *FLAGS, "-I", ROOT / "csrc_meta", *sources, "-o", program], check=True)
    for capability in ("default", "avx2", "avx512"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run([program, "300", "1"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{capability}: {done.stdout}{done.stderr[-4000:]}"
        assert "no difference" in done.stdout


REPORTS = """
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at backward_kernel+0x2d0 in backward.py:200
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f0000000200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 512 bytes
========= Uninitialized __global__ memory read of size 8 bytes
=========     at 0x4b0 in backward.py:200:backward_kernel
========= Uninitialized __global__ memory read of size 8 bytes
=========     at void cutlass::Kernel2<cutlass_80_gemm>(T1::Params)+0x1390
========= Error: Race reported between Write access at reduce_kernel+0x1c0 and Read access at reduce_kernel+0x2f0 [4 hazards]
========= ERROR SUMMARY: 4 errors
"""


def test_kernels_that_compute_sanitizer_reports():
    cutlass = "void cutlass::Kernel2<cutlass_80_gemm>(T1::Params)"
    assert sanitize_gpu.reported(REPORTS) == {"backward_kernel": 2, cutlass: 1, "reduce_kernel": 1}


def test_sanitize_gpu_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("sys.argv", ["sanitize_gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        sanitize_gpu.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="needs compute-sanitizer of the CUDA toolkit"):
        sanitize_gpu.main()
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr("sys.argv", ["sanitize_gpu.py", "leakcheck"])
    with pytest.raises(SystemExit, match="leakcheck: no tool of make sanitize-gpu; there are memcheck, racecheck"):
        sanitize_gpu.main()


@pytest.mark.parametrize(
    "tool, reports, clean",
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", True),
        ("memcheck", REPORTS, False),
        ("initcheck", REPORTS, False),
        ("initcheck", "=========     at void gemm<T1>(T1)+0x1390\n========= ERROR SUMMARY: 1 error", True),
        ("initcheck", "========= ERROR SUMMARY: 1 error", False),  # in no kernel that can be told
        ("racecheck", "=========     at void gemm<T1>(T1)+0x1390\n========= ERROR SUMMARY: 1 error", False),
    ],
)
def test_only_other_libraries_reads_are_let_pass(tool, reports, clean, tmp_path, monkeypatch):
    """A program in compute-sanitizer's place, which writes these reports and runs nothing."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\nwhile [ $1 != --log-file ]; do shift; done\ncat > $2 << 'END'\n{reports}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setattr(sanitize_gpu, "LOGS", tmp_path)
    assert sanitize_gpu.check(tool, str(program)) == clean
