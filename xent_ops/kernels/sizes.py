"""Sizes that may be symbolic: while launches are recorded (triton/recording.py), a size means a range of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# With fewer classes compiled F.cross_entropy is faster than our kernels, or as fast: docs/benchmarks.md, "Few classes".
# On a CPU it takes .78 of our time with 2 classes, .70 with 21, .75 with 128, .94 with 300 and 1.23 with 384. Where the
# classes are not the last dimension, compiled code copies the logits: it took .35 to .55 with 512 to 8192 classes too.
# On a GPU it takes .025 with 2 classes, .30 with 21, .58 with 128 and 1.26 with 1024. Between the last two nothing was
# measured.
FEW_CLASSES = {"cpu": 384, "cuda": 512}
_DYNAMO_ANSWERS = torch.__version__ >= "2.13"


def symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def size_hint(size: Any) -> int:
    """The size at tracing. It chooses the kernels, which then serve every other size too."""
    return size.node.hint if symbolic(size) else size


def size_to_serve(size: Any, many: int) -> int:
    """``size``, but at least ``many`` in a package: it serves many rows, even if it was traced with few."""
    return max(size_hint(size), many) if symbolic(size) else size


def depend_on_data(tensor: torch.Tensor) -> bool:
    """Do the sizes depend on data while a graph is compiled, for example of rows that a mask selects? Dynamo of torch
    2.11 cannot tell."""
    if not (_DYNAMO_ANSWERS and torch.compiler.is_compiling()):
        return False
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return has_free_unbacked_symbols(tensor)


def statically_true(condition: Any) -> bool:
    """Does the condition hold for all sizes of the range? Adds no guard: a package has none."""
    # Dynamo calls a symbol a bool. torch.jit.trace has sizes as tensors.
    if not torch.compiler.is_dynamo_compiling() and isinstance(condition, (bool, torch.Tensor)):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def statically_equal(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(shape) == len(other) and all(statically_true(a == b) for a, b in zip(shape, other, strict=True))
