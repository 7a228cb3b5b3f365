"""Makes the environment of `make test-ascend`: setup_ascend.py FOLDER, run by the interpreter of the main environment.

It holds triton-ascend. Everything else, including torch, is from the main environment, which comes later on
sys.path. If triton-ascend cannot be installed, it says so and exits with 75, which the Makefile treats as "skipped".
torch_npu goes into FOLDER/torch_npu, which is not on sys.path; without it the tests of Inductor-Ascend are skipped.
"""

import hashlib
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements-ascend.txt"
TORCH_NPU = ROOT / "requirements-ascend-npu.txt"
OURS = "made-by-make"  # a folder without it belongs to someone else
SKIPPED = 75
PYTHONS = ((3, 9), (3, 11))  # the versions of triton-ascend's wheels


def main() -> None:
    venv = Path(sys.argv[1]).absolute()
    packages = sysconfig.get_path("purelib")
    stamp = venv / "finished"
    parts = [REQUIREMENTS.read_bytes(), TORCH_NPU.read_bytes(), sys.version.encode(), packages.encode()]
    state = hashlib.sha256(b"\0".join(parts)).hexdigest()
    if stamp.exists() and stamp.read_text() == state:
        return
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        skip(f"triton-ascend has no wheels for {sys.platform} on {platform.machine()}")
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        skip(f"triton-ascend has wheels for Python 3.9 to 3.11, this is {platform.python_version()}: PYTHON=...")
    if venv.exists() and not (venv / OURS).exists():
        skip(f"{venv} was not made by make and is left alone")
    print(f"Setting up {venv}", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir()
    (venv / OURS).touch()
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    if subprocess.run([*pip, "--requirement", REQUIREMENTS]).returncode:
        shutil.rmtree(venv)
        skip("pip could not install triton-ascend; what it said is above")
    if subprocess.run([*pip, "--target", venv / "torch_npu", "--requirement", TORCH_NPU]).returncode:
        print("test-ascend: pip could not install torch_npu; what it said is above", flush=True)
    (own,) = venv.glob("lib/python*/site-packages")
    (own / "main-environment.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    stamp.write_text(state)


def skip(reason: str) -> None:
    print(f"test-ascend: SKIPPED: {reason}.", flush=True)
    sys.exit(SKIPPED)


if __name__ == "__main__":
    main()
