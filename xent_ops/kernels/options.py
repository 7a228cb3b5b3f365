"""The options of a loss as one record, from the call to the launch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Options(NamedTuple):
    """What changes the loss of a row. Schemas and Triton signatures spell the fields out, in this order."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


DEFAULTS = Options()


def bind(given: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    """(the options among the keywords of an operator's call, the other keywords).

    The dispatcher leaves out what equals the schema's default.
    """
    fields = {name: value for name, value in given.items() if name in _FIELDS}
    return Options(**fields), {name: value for name, value in given.items() if name not in _FIELDS}


_FIELDS = frozenset(Options._fields)
