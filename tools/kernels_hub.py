"""Makes a repository of Hugging Face's kernels hub from the package: kernels_hub.py FOLDER.

    build.toml                      what kernel-builder reads
    torch-ext/xent_ops/             the package, its source there
    build/torch-BACKEND/            the package as ``kernels`` loads it, with what describes it: metadata.json
    build/torch-BACKEND/xent_ops/   where earlier versions of ``kernels`` look for it

The kernels are Triton and plain torch, so all backends have the same files: those of the package without the command
line and without C++. Needs neither torch nor ``kernels``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

NAME = "xent-ops"
VERSION = 0  # of the hub: 0 says that the interface may still change
LICENSE = "Apache-2.0"
# As kernel-builder calls them, and the folder that ``kernels`` looks for on an NPU.
BACKENDS = {"cpu": "cpu", "cuda": "cuda", "metal": "metal", "rocm": "rocm", "xpu": "xpu", "npu": "cann"}

# Of the command line, which belongs to an installed package.
LEFT_OUT = ("bench", "__main__.py", "_compile_check.py", "_doctor.py", "_doctor_npu.py", "_environment.py")

BUILD_TOML = """\
[general]
name = "{name}"
version = {version}
edition = 5
license = "{license}"
backends = [{backends}]

[torch-noarch]
"""

# The names of the folder above, imported by its path under one name, so that the operators are defined once.
EARLIER = '''\
"""For versions of ``kernels`` that load this folder and not the one above."""

import importlib.util
import sys
from pathlib import Path

_name = "{id}"
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).parents[1] / "__init__.py")
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    try:
        _spec.loader.exec_module(sys.modules[_name])
    except BaseException:  # else a second import would find half of it
        del sys.modules[_name]
        raise
globals().update({{name: value for name, value in vars(sys.modules[_name]).items() if not name.startswith("__")}})
__all__ = sys.modules[_name].__all__
__version__ = sys.modules[_name].__version__
'''


def make(package: Path, folder: Path) -> None:
    """The repository in ``folder``, which is made, from the files of ``package``."""
    module = NAME.replace("-", "_")
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS.values())
    folder.mkdir(parents=True)
    build = BUILD_TOML.format(name=NAME, version=VERSION, license=LICENSE, backends=backends)
    (folder / "build.toml").write_text(build)
    source = folder / "torch-ext" / module
    shutil.copytree(package, source, ignore=shutil.ignore_patterns(*LEFT_OUT, "__pycache__", "*.so"))
    unique = hashlib.sha256(json.dumps(digests(source)).encode()).hexdigest()[:7]
    for name, backend in BACKENDS.items():
        variant = folder / "build" / f"torch-{name}"
        shutil.copytree(source, variant)
        identifier = f"_{module}_{backend}_{unique}"
        (variant / module).mkdir()
        (variant / module / "__init__.py").write_text(EARLIER.format(id=identifier))
        metadata = {
            "name": NAME,
            "id": identifier,
            "version": VERSION,
            "license": LICENSE,
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digests(variant)},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def digests(folder: Path) -> dict[str, str]:
    """Of each file, by its name within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files
    }


if __name__ == "__main__":
    make(ROOT / "xent_ops", Path(sys.argv[1]))
