"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, without torch and without Python around them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
