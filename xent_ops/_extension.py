"""The libraries that were built from csrc_meta, whether they match the sources, and the command that builds them.

This file imports neither torch nor other modules of the package: setup.py and tools/setup_env.py run it by its path.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import re
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE.parent / "csrc_meta"  # in a checkout; an installed package has none
SCHEMAS = PACKAGE / "ops" / "schemas.py"
MODULE = PACKAGE / "_C.abi3.so"  # CPU kernels for Python
OLDEST_SETUPTOOLS = "setuptools>=77"  # as in pyproject.toml, which --no-build-isolation ignores
LIBRARY = PACKAGE / "libxent_ops.so"  # the operators for processes without Python

_MARK = "xent_ops sources "


def sources_hash() -> str | None:
    """The hash of all files that the build reads, or None if there are no sources."""
    if not SOURCES.is_dir():
        return None
    digest = hashlib.sha256()
    files = [path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h", ".inl")]
    for path in sorted([*files, SCHEMAS, PACKAGE.parent / "setup.py"]):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE.parent).as_posix()}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()[:16]


def mark(sources: str) -> str:
    """The text that the build compiles into each product."""
    return _MARK + sources


def built_hash(product: Path) -> str | None:
    """The hash of the sources of this product. None: the product does not exist or is not ours."""
    if not product.exists():
        return None
    found = re.search(_MARK.encode() + rb"([0-9a-f]{16})", product.read_bytes())
    return found.group(1).decode() if found else None


def is_current() -> bool:
    """Do both products exist, and were they built from the sources in this checkout?"""
    sources = sources_hash()
    return sources is not None and built_hash(MODULE) == sources == built_hash(LIBRARY)


def build_command() -> str:
    """The command that builds the C++ part of this installation, or a text that says which tool is missing."""
    pip = [sys.executable, "-m", "pip", "install"]
    build = shlex.join([*pip, "--no-build-isolation", "--no-deps"])
    command = f"XENT_OPS_BUILD_CPP=1 {build} {_origin()}"
    return command if _setuptools_is_new() else f"{shlex.join([*pip, OLDEST_SETUPTOOLS])} && {command}"


def _setuptools_is_new() -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= int(OLDEST_SETUPTOOLS.split("=")[1])
    return False


def _origin() -> str:
    """pip's arguments for the source of this installation, from the installation's own record (PEP 610)."""
    if SOURCES.is_dir():
        return shlex.join(["--editable", str(PACKAGE.parent)])
    record = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        record = importlib.metadata.distribution("xent-ops").read_text("direct_url.json")
    found = json.loads(record or "{}")
    url = found.get("url", "")
    if "vcs_info" in found:
        vcs = found["vcs_info"]
        # pip may have cached this commit's wheel without C++, and it does not reinstall the same commit.
        return shlex.join(["--no-cache-dir", "--force-reinstall", f"{vcs['vcs']}+{url}@{vcs['commit_id']}"])
    if url and not url.endswith(".whl"):
        folder = unquote(urlsplit(url).path) if "dir_info" in found else ""
        return shlex.quote(folder) if folder else shlex.join(["--no-cache-dir", "--force-reinstall", url])
    return "<the folder with the sources of xent_ops>"


def library_path() -> str:
    """Path of libxent_ops.so: schemas, meta and CPU kernels of the operators of logits, without Python.

    Load it with ``torch.ops.load_library``, or with ``dlopen`` in a C++ program; docs/cpp.md shows both.

    Raises:
        FileNotFoundError: the package was built without C++.

    Examples:
        >>> torch.ops.load_library(xent_ops.library_path())
    """
    if not LIBRARY.exists():
        raise FileNotFoundError(
            f"there is no {LIBRARY}: this xent_ops was built without C++. This builds it, or says what is missing: "
            f"{build_command()}"
        )
    return str(LIBRARY)
