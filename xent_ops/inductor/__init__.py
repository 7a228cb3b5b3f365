"""What is for Inductor alone; the functions here put our loss in the place of ``F.cross_entropy`` unasked.

``torch.compile(model, options=xent_ops.inductor.options())`` replaces it in one compiled model, ``enable()`` in all
that this thread compiles from then on, ``with replace_cross_entropy():`` in those compiled inside the block.
``last_report()`` says what was replaced, what was not, and why. docs/compile.md shows it.

Importing this costs nothing: ``torch._inductor``, which takes over a second, is imported by the functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..ops.library import BEFORE_TRACING
from . import cache_tag
from .report import Call, Report, last_report

__all__ = ["Call", "Report", "disable", "enable", "last_report", "options", "replace_cross_entropy"]

cache_tag.install()


def _before_tracing() -> None:
    """The cache tag at every trace: it is not there in another thread, or after the user has set one. The lowerings at
    the first: Inductor must know them before it compiles, and importing its tables costs over a second."""
    cache_tag.install()
    from . import decomposition

    decomposition.install()


BEFORE_TRACING.append(_before_tracing)


def options(base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options for ``torch.compile`` that replace ``F.cross_entropy`` in what is compiled with them.

    Args:
        base: further options, kept as they are; a ``pre_grad_custom_pass`` among them, or else the one that is set
            in ``torch._inductor.config`` now, runs before ours.

    Clears the report.
    """
    from . import graph_pass, report

    report.clear()
    return graph_pass.settings(base or {})


def enable() -> None:
    """Replace ``F.cross_entropy`` in everything that Inductor compiles from now on in this thread. Idempotent.

    What is compiled already stays as it is (``torch.compiler.reset()`` forgets it). Passes that are set already run
    before ours. Clears the report.
    """
    from torch._inductor import config

    from . import graph_pass, report

    report.clear()
    for name, value in graph_pass.settings({}).items():
        setattr(config, name, value)


def disable() -> None:
    """Undo ``enable()``; other passes stay, also those that were set after it. The report stays too."""
    from torch._inductor import config

    from . import graph_pass

    current = config.pre_grad_custom_pass
    if (ours := graph_pass.ours_in(current)) is not None and ours.timing_before is not None:
        config.pre_grad_pass_timing = ours.timing_before
    config.pre_grad_custom_pass = graph_pass.without_ours(current)


@contextlib.contextmanager
def replace_cross_entropy() -> Iterator[None]:
    """``enable()`` for the compilations inside the block: a function compiles at its first call, not where it is
    decorated. Clears the report on entry."""
    from torch._inductor import config

    from . import graph_pass, report

    report.clear()
    with config.patch(**graph_pass.settings({})):
        yield
