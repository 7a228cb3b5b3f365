"""Makes the private environment that the Makefile's targets run in: setup_env.py FOLDER.

It does nothing if the environment is finished and its requirements are the same. Otherwise it starts again from
nothing; pip keeps its downloads. If only the sources of the C++ extension changed, it builds the extension again.
Three variables, each remembered until another value is given:

PYTHON           the interpreter to build on; if it has torch, that torch is used and none is installed
TORCH            a requirement for torch other than the one in requirements-dev.txt
TORCH_INDEX_URL  a package index for torch: PyTorch's install page names one for each build

and one for this call: XENT_OPS_BUILD_CPP=0 does not build the C++ extension.
"""

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements-dev.txt"
VARIABLES = ("PYTHON", "TORCH", "TORCH_INDEX_URL")
OURS = "made-by-make"  # written first: an environment without it belongs to someone else
STAMP = "finished.json"  # written last: an environment without it was interrupted

HINT = """
*** The package index has no CPU build of torch ({requirement}), so its default build comes next: mostly a
*** CUDA build of several GB, though this machine shows no NVIDIA GPU. For another, interrupt this and add
*** to make: TORCH_INDEX_URL=<the address that PyTorch's install page gives for a CPU build>
"""


def main() -> None:
    venv = Path(sys.argv[1]).absolute()
    if venv.exists() and any(venv.iterdir()) and not (venv / OURS).exists():
        sys.exit(
            f"{venv} was not made by make and is left alone. Add VENV=<another folder> to make;\n"
            f"with PYTHON={venv}/bin/python beside it, the torch that is installed there is used."
        )
    stamp = venv / STAMP
    before = json.loads(stamp.read_text()) if stamp.exists() else {}
    state = {name: os.environ.get(name) or before.get(name, "") for name in VARIABLES}
    state["inputs"] = digest(venv)
    if state == before:
        if os.environ.get("XENT_OPS_BUILD_CPP") != "0" and not extension_is_current():
            install_project(venv)
        return

    base = shutil.which(state["PYTHON"] or sys.executable)
    if base is None:
        sys.exit(f"PYTHON={state['PYTHON']} is not there.")
    print(f"Setting up {venv} with {base}", flush=True)
    venv.mkdir(parents=True, exist_ok=True)
    (venv / OURS).touch()
    for path in venv.iterdir():  # all except OURS: if this is interrupted, the folder is still known as ours
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != OURS:
            path.unlink()
    run(base, "-m", "venv", str(venv))
    install(venv, base, state["TORCH"], state["TORCH_INDEX_URL"])
    stamp.write_text(json.dumps(state, indent=2) + "\n")


def digest(venv: Path) -> str:
    """A hash of everything that an environment depends on; also its path, because a moved one does not work."""
    texts = [file.read_bytes() for file in (REQUIREMENTS, ROOT / "pyproject.toml", Path(__file__))]
    return hashlib.sha256(b"\0".join([*texts, bytes(ROOT), bytes(venv)])).hexdigest()


def install(venv: Path, base: str, torch: str, index: str) -> None:
    pip = pip_of(venv)
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    pinned_torch = next(line for line in lines if line.startswith("torch=="))

    site = "" if torch or index else site_with_torch(base)
    if site:
        print(f"Using the torch in {site}", flush=True)
        # After the environment's own packages on sys.path, so that the pins below take precedence.
        packages = next(venv.glob("lib/python*/site-packages"))
        (packages / "torch-of-base.pth").write_text(f"{site}\n")
    else:
        install_torch(pip, torch or pinned_torch, index)

    torch_there = answer(pip[0], "from importlib.metadata import version; print(version('torch'))")
    if not torch_there:
        sys.exit(f"The torch of {base} has no package metadata, which pip needs: install it as a wheel.")
    triton_there = answer(pip[0], "import triton; print(triton.__version__)")
    there = ("torch", "triton") if triton_there else ("torch",)
    pins = [line for line in lines if line and re.split("[=;]", line)[0] not in there]
    if torch_there.partition("+")[0] != pinned_torch.removeprefix("torch=="):
        pins = [older(pin, triton_there) for pin in pins]
    # The installed torch is a requirement too. Otherwise pip replaces it if a pin and torch conflict.
    run(*pip, *pins, f"torch=={torch_there}")
    install_project(venv)


def older(pin: str, triton: str) -> str:
    """The pin, loosened if it may not fit a torch other than the pinned one."""
    if pin.startswith("setuptools=="):
        return "setuptools>=77"  # as in pyproject.toml; torch 2.11 wants one below 82
    if pin.startswith("numpy==") and triton and version(triton) < (3, 7):
        return re.sub("^[^;]*", "numpy<2.4", pin)  # Triton 3.6's interpreter converts arrays with an axis to scalars
    return pin


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def pip_of(venv: Path) -> tuple[str, ...]:
    return str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"


def extension_is_current() -> bool:
    return runpy.run_path(str(ROOT / "xent_ops" / "_extension.py"))["is_current"]()


def install_project(venv: Path) -> None:
    """Install the project without dependencies, and build its C++ extension by the environment's setuptools and torch.
    So no second torch is installed. If the C++ part lacks something, the build stops with an error."""
    os.environ["XENT_OPS_BUILD_CPP"] = os.environ.get("XENT_OPS_BUILD_CPP") or "1"
    run(*pip_of(venv), "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def site_with_torch(base: str) -> str:
    """The folder of the interpreter's torch; empty if it has none that is new enough."""
    found = answer(base, "import torch; print(torch.__version__, torch.__path__[0], sep='\\n')")
    if not found:
        return ""
    torch, path = found.splitlines()
    if version(torch) < (2, 11):  # as in pyproject.toml
        print(f"The torch {torch} of {base} is too old, another one is installed.", flush=True)
        return ""
    return str(Path(path).parent)


def install_torch(pip: tuple[str, ...], requirement: str, index: str) -> None:
    if index:
        run(*pip, "--no-deps", "--index-url", index, requirement)  # torch from this index only
        run(*pip, "--extra-index-url", index, requirement)  # its dependencies from any index
        return
    has_gpu = shutil.which("nvidia-smi") or os.path.exists("/dev/nvidiactl")
    if sys.platform == "linux" and not has_gpu and re.fullmatch(r"torch==[\d.]+", requirement):
        attempt = subprocess.run([*pip, f"{requirement}+cpu"], stderr=subprocess.PIPE, text=True)
        if attempt.returncode == 0:
            return
        if "No matching distribution" not in attempt.stderr:
            sys.exit(attempt.stderr)  # for example the network: another build would not help
        print(HINT.format(requirement=f"{requirement}+cpu"), flush=True)
    run(*pip, requirement)


def answer(python: str, code: str) -> str:
    """The output of the code in that interpreter; empty if it fails."""
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def run(*command: str) -> None:
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError:
        sys.exit(f"\nThis failed: {' '.join(command)}\nOnce its cause is mended, say make again.")


if __name__ == "__main__":
    main()
