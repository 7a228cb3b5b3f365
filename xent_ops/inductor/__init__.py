"""Support for Inductor, and a pass that replaces ``F.cross_entropy`` in compiled models, with or without the head.

``torch.compile(model, options=xent_ops.inductor.options())`` replaces it in one compiled model, ``enable()`` in
everything that this thread compiles from then on, ``with replace_cross_entropy():`` in everything compiled inside the
block. ``last_report()`` lists the replaced calls, and the others with the reason. docs/compile.md shows it.

This module imports quickly: only its functions import ``torch._inductor``, which takes over a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from .._private import unless_gone
from ..kernels.options import HeadProducts
from ..ops import arguments
from ..ops.library import BEFORE_TRACING
from . import cache_tag, lowerings
from .rewriting.report import Call, Report, last_report

__all__ = ["Call", "Report", "disable", "enable", "last_report", "options", "replace_cross_entropy"]

cache_tag.install()


def _before_tracing() -> None:
    """The lowerings are installed late, because importing Inductor's tables takes over a second."""
    cache_tag.install()
    lowerings.install()


BEFORE_TRACING.append(_before_tracing)


@unless_gone(
    "the pass that replaces F.cross_entropy",
    "losses stay as they are written, and a mode of torch.compile is not made into options",
    lambda base, *_: dict(base) if isinstance(base, Mapping) else {},
)
def _settings(base: Mapping[str, Any] | str | None, linear: bool | str, products: HeadProducts | None) -> Any:
    from .rewriting import graph_pass, head, report

    base = graph_pass.mode_options(base) if isinstance(base, str) else base or {}
    settings = graph_pass.settings(base, head.Heads(linear, products))
    report.clear()
    return settings


@arguments.named
def options(
    base: Mapping[str, Any] | str | None = None,
    *,
    linear: bool | str = "auto",
    products: HeadProducts | None = None,
) -> dict[str, Any]:
    """Options for ``torch.compile`` that replace ``F.cross_entropy`` in the model that it compiles.

    Args:
        base: further options to keep, or the name of a mode of ``torch.compile`` such as ``"reduce-overhead"``
            (``torch.compile`` itself refuses a mode together with options). A ``pre_grad_custom_pass`` in ``base`` runs
            before ours; without one, the pass that is now set in ``torch._inductor.config`` does.
        linear: whether the head and the loss become one operator, ``xent::linear_cross_entropy``. ``"auto"``: if the
            logits are large and nothing else reads them. True: also for small logits, and for ``reduction="none"``,
            which takes a fourth matrix multiplication. False: only for ``F.linear_cross_entropy``.
        products: as for ``xent_ops.linear_cross_entropy``, for these heads. A head that does not support it stays
            unchanged, and the report says why.

    Clears the report. Raises ValueError for an invalid ``linear`` or ``products``, and for a mode that torch does not
    have or that runs no passes.

    Examples:
        >>> model = torch.nn.Linear(16, 16)
        >>> compiled = torch.compile(model, options=xent_ops.inductor.options())
    """
    return _settings(base, linear, products)


def enable(*, linear: bool | str = "auto", products: HeadProducts | None = None) -> None:
    """Replace ``F.cross_entropy`` in everything that Inductor compiles from now on in this thread. Idempotent.

    Code that is compiled already does not change (``torch.compiler.reset()`` discards it). Passes that are set already
    run before ours. Clears the report. ``linear``, ``products``: as in ``options``.

    Examples:
        >>> xent_ops.inductor.enable()
        >>> model = torch.compile(torch.nn.Linear(16, 16))
        >>> xent_ops.inductor.disable()
    """
    from torch._inductor import config

    for name, value in _settings(None, linear, products).items():
        setattr(config, name, value)


def disable() -> None:
    """Undo ``enable()``. The report and other passes stay, even passes that were set after it.

    Examples:
        >>> xent_ops.inductor.enable(linear=False)
        >>> xent_ops.inductor.disable()
    """
    from torch._inductor import config

    from .rewriting import graph_pass

    current = config.pre_grad_custom_pass
    if (ours := graph_pass.ours_in(current)) is not None and ours.timing_before is not None:
        config.pre_grad_pass_timing = ours.timing_before
    config.pre_grad_custom_pass = graph_pass.without_ours(current)


@contextlib.contextmanager
def replace_cross_entropy(*, linear: bool | str = "auto", products: HeadProducts | None = None) -> Iterator[None]:
    """``enable()`` for the compilations inside the block. A function compiles at its first call, not at its decoration.
    Clears the report on entry.

    Examples:
        >>> loss = torch.compile(torch.nn.functional.cross_entropy)
        >>> with xent_ops.inductor.replace_cross_entropy():
        ...     value = loss(torch.randn(4, 10), torch.tensor([1, 2, 3, -100]))
        >>> len(xent_ops.inductor.last_report().replaced)
        1
    """
    from torch._inductor import config

    with config.patch(**_settings(None, linear, products)):
        yield
