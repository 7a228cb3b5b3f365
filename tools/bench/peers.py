"""The heads of trainers, from the files of their packages alone.

A trainer's package imports much that its head does not read: verl ray, TRL datasets. So the modules around a head are
left out, and a wheel that was unpacked without its dependencies is enough.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent_ops.bench.check import IGNORE_INDEX
from xent_ops.bench.contestants import Function

TRL_CLASSES = 32768  # classes of a tile, as TRL's trainers call its head: _CHUNKED_LOGPROB_CHUNK_SIZE of TRL 1.16


def _folder(package: str) -> Path:
    """The folder of a package, which is found but not imported."""
    top, *parts = package.split(".")
    found = importlib.util.find_spec(top)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {top!r}", name=top)
    return Path(found.submodule_search_locations[0], *parts)


@contextlib.contextmanager
def _without_init(*packages: str) -> Iterator[None]:
    """Modules of these packages can be imported, and the packages' own ``__init__`` does not run."""
    added = [name for name in packages if name not in sys.modules]
    folders = {name: _folder(name) for name in added}
    for name in added:
        sys.modules[name] = bare = ModuleType(name)
        bare.__path__ = [str(folders[name])]
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def _of_trl(module: str) -> Any:
    """A module of trl.kernels. It needs one function of TRL's utilities, which gathers what DeepSpeed has split."""
    with _without_init("trl", "trl.kernels", "trl.trainer"):
        utilities = ModuleType("trl.trainer.utils")
        utilities.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()  # type: ignore[attr-defined]
        sys.modules.setdefault(utilities.__name__, utilities)  # TRL's backward imports it again
        return importlib.import_module(f"trl.kernels.{module}")


# A head of log-probabilities is a function of (hidden, matrix, target, *others) that returns them and the entropies.


def trl_log_probs(entropy: bool = True) -> Function:
    apply, outputs = _of_trl("chunked_logprob").ChunkedLogProbFunction.apply, ("entropy",) if entropy else ()

    def call(hidden: Tensor, matrix: Tensor, target: Tensor, *_: Tensor) -> Any:
        return apply(hidden, matrix, None, target, 1.0, TRL_CLASSES, None, 1.0, outputs)[:2]

    return call


def verl_log_probs() -> Function:
    if not torch.cuda.is_available():
        raise ImportError("verl's kernel needs a GPU")
    with _without_init("verl", "verl.utils", "verl.plugin"):
        importlib.import_module("verl.utils.kernel.kernels")
        apply = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, matrix, target, *_: apply(hidden, matrix, target, 1.0, "none", None)


def liger_log_probs() -> Function:
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    apply = module.LigerFusedLinearScaledCrossEntropyFunction.apply

    def call(hidden: Tensor, matrix: Tensor, target: Tensor, *_: Tensor) -> Any:
        loss, entropy = apply(hidden, matrix, target, 1.0, IGNORE_INDEX, 1, True)
        return -loss, entropy

    return call


def torch_log_probs() -> Function:
    """Without entropies, which torch's function does not return."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 and later have)")
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    loss: Any = F.linear_cross_entropy  # type: ignore[attr-defined, unused-ignore]
    return lambda hidden, matrix, target, *_: (-loss(hidden, matrix, target, reduction="none", options=options), None)


def trl_divergence(beta: float) -> Function:
    """The mean over the rows that are not ignored. TRL's trainer takes the ignored ones out first."""
    apply = _of_trl("chunked_divergence").ChunkedDivergenceFunction.apply

    def call(hidden: Tensor, matrix: Tensor, target: Tensor, teacher: Tensor, teacher_matrix: Tensor) -> Tensor:
        rows, _ = apply(hidden, matrix, None, teacher, teacher_matrix, None, beta)
        counted = target != IGNORE_INDEX
        return torch.where(counted, rows, 0.0).sum() / counted.sum()

    return call
