"""A tag in the keys of torch's compile caches, so that artifacts of another version of xent_ops are never used.

torch keeps compiled graphs on disk. The key of a graph with a backward (AOTAutograd's cache) comes from the graph
that Dynamo saw. It names our operators, but holds neither their autograd formulas nor their decompositions. After a
change of either, torch served the old backward (tried on torch 2.11 and 2.13). So every key gets a tag from our
version and sources. The cost: an upgrade starts with cold caches, once.

Of DTensors that graph holds neither the rank nor its part of the classes, which our operators compute from the mesh
later. Ranks that share a cache folder took each other's graphs, and a second training had a loss of NaN (torch 2.13).
So the keys have the rank too.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch.distributed as dist

from .._version import __version__

_PACKAGE = Path(__file__).parent.parent


@functools.cache
def tag() -> str:
    """``xent_ops-<version>-<hash of the package's .py files>``; characters that are safe in a file name.

    The hash covers relative names and contents, so that two machines with the same release share their artifacts. It
    takes 2 ms. For an installation without sources (zipped, or .pyc alone) only the version distinguishes the tag.
    """
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\0{len(source)}\0".encode())
        digest.update(source)
    return f"xent_ops-{__version__}-{digest.hexdigest()[:16]}"


def _rank() -> str:
    """Empty in a process without others. The last underscore tells 1 of 2 from 1 of 20."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    return f"rank_{dist.get_rank()}_of_{dist.get_world_size()}_"


def install() -> None:
    """Append the tag and the rank to what the user set in ``torch.compiler.config.cache_key_tag``. Idempotent.

    Called on import, and again whenever one of our operators is traced, because torch's configuration belongs to a
    thread (a new thread starts from the defaults), and the user may have assigned another tag in the meantime.
    """
    from torch.compiler import config

    for part in (tag(), _rank()):
        if part not in config.cache_key_tag:
            config.cache_key_tag = f"{config.cache_key_tag}+{part}" if config.cache_key_tag else part
