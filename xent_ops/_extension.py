"""What was built from csrc_meta, and does it match the sources?

Needs neither torch nor the rest of the package: setup.py and tools/setup_env.py run this file by its path.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE.parent / "csrc_meta"  # in a checkout; an installed package has none
SCHEMAS = PACKAGE / "ops" / "schemas.py"
MODULE = PACKAGE / "_C.abi3.so"  # CPU kernels for Python
LIBRARY = PACKAGE / "libxent_ops.so"  # the operators for processes without Python

_MARK = "xent_ops sources "


def sources_hash() -> str | None:
    """Of all that the build reads; None where there are no sources."""
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
    """What the build compiles into each product."""
    return _MARK + sources


def built_hash(product: Path) -> str | None:
    """The hash of the sources that this product was built from; None where it is not there or not ours."""
    if not product.exists():
        return None
    found = re.search(_MARK.encode() + rb"([0-9a-f]{16})", product.read_bytes())
    return found.group(1).decode() if found else None


def is_current() -> bool:
    """Are both products there, and built from the sources beside them?"""
    sources = sources_hash()
    return sources is not None and built_hash(MODULE) == sources == built_hash(LIBRARY)


def library_path() -> str:
    """Path of libxent_ops.so: schemas, meta and CPU kernels of every operator for processes without Python.

    ``torch.ops.load_library`` takes it, and ``dlopen`` in a C++ program; docs/cpp.md shows both.

    Raises:
        FileNotFoundError: the package was built without C++.

    Examples:
        >>> torch.ops.load_library(xent_ops.library_path())
    """
    if not LIBRARY.exists():
        raise FileNotFoundError(
            f"there is no {LIBRARY}: this xent_ops was built without C++. This builds it, or says what is missing: "
            "XENT_OPS_BUILD_CPP=1 pip install --no-build-isolation --no-deps <its sources>"
        )
    return str(LIBRARY)
