"""Makes the environment of `make test-integrations`: setup_integrations.py FOLDER, run by that of the main environment.

It holds packages that train with our loss (the extra "integrations" of pyproject.toml), the newest of each that the
index has now, and takes everything else from the main environment, which comes later on sys.path: torch, and
transformers and peft at versions that go together.
"""

import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = "made-by-make"  # a folder without it belongs to someone else


def packages() -> list[str]:
    """Those of the extra that the main environment lacks, where they are pinned."""
    ours = metadata.requires("xent-ops") or []
    extra = {line.split(";")[0].strip() for line in ours if re.search(r"extra == .integrations.", line)}
    pinned = {line.split("==")[0] for line in (ROOT / "requirements-dev.txt").read_text().splitlines()}
    return sorted(extra - pinned)


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
    subprocess.run([*pip, *packages()], check=True)
    versions = "; ".join(f"{name} {version(python, name)}" for name in packages())
    print(f"test-integrations: {versions}", flush=True)


def version(python: Path, name: str) -> str:
    program = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
