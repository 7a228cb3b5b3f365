"""Makes the environment of `make test-integrations`: setup_integrations.py FOLDER, run by that of the main environment.

It holds the newest version of each of PACKAGES and ALONE in the index. All others come from the main environment, which
is later on sys.path: torch, and transformers, accelerate and peft at versions that fit together. Each of MEGATRON is in
a folder of its own beside them, which PYTHONPATH chooses (Makefile).
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Packages that train with our loss, with their dependencies.
PACKAGES = (
    *("ai2-olmo-core", "datasets", "deepspeed", "flash-linear-attention", "kernels", "lightning"),
    *("pytorch-metric-learning", "sentence-transformers", "torchtitan", "trl"),
)
# Without their dependencies (an older transformers, ray, CUDA libraries): the recipes do not use these.
ALONE = ("speculators", "verl")
# Folder -> what pip installs there: the newest version, and the one that Python 3.11 still gets by itself.
MEGATRON = {"megatron-newest": "megatron-core", "megatron-0.16.1": "megatron-core==0.16.1"}
OURS = "made-by-make"  # a folder without it belongs to someone else


def main() -> None:
    venv, main_packages = Path(sys.argv[1]).absolute(), sysconfig.get_path("purelib")
    python = venv / "bin" / "python"
    if venv.exists() and not (venv / OURS).exists():
        sys.exit(f"{venv} was not made by make and is left alone. Add VENV=<another folder> to make.")
    if not python.exists():
        print(f"Setting up {venv}", flush=True)
        venv.mkdir(exist_ok=True)
        (venv / OURS).touch()
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        (own,) = venv.glob("lib/python*/site-packages")
        (own / "main-environment.pth").write_text(f"import site; site.addsitedir({main_packages!r})\n")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--upgrade"]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    versions = [f"{name} {version(python, name)}" for name in (*PACKAGES, *ALONE)]
    versions += [install_megatron(pip, venv / folder, wanted) for folder, wanted in MEGATRON.items()]
    print("test-integrations:", "; ".join(versions), flush=True)


def install_megatron(pip: list, folder: Path, wanted: str) -> str:
    """Returns its name and version."""
    shutil.rmtree(folder, ignore_errors=True)
    # Since 0.17 the package asks for Python 3.12. Its Python code runs on 3.11 too; its one compiled module, for data
    # sets, does not, and no test imports it.
    as_on = ["--python-version", "3.12", "--only-binary=:all:", "--ignore-requires-python"]
    options = as_on if sys.version_info < (3, 12) and wanted == "megatron-core" else []
    subprocess.run([*pip, "--no-deps", "--target", folder, *options, wanted], check=True)
    (information,) = folder.glob("megatron_core-*.dist-info")
    return "megatron-core " + information.stem.split("-")[1]


def version(python: Path, name: str) -> str:
    program = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
