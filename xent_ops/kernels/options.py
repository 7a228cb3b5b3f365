"""The options of a loss as one record, from the call to the launch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Options(NamedTuple):
    """What changes the loss of a row. Schemas and Triton signatures spell the fields out, in this order."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


class LossOptions(NamedTuple):
    """The options of a whole loss: those of its rows, the z-loss, the reduction."""

    rows: Options
    lse_square_scale: float = 0.0
    reduction: str = "mean"

    def keywords(self) -> dict[str, Any]:
        """As the composite and the reduced operators take them."""
        return {**self.rows._asdict(), "lse_square_scale": self.lse_square_scale, "reduction": self.reduction}


DEFAULTS = Options()


def as_record(given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of an operator's call with the options among them as one record, ``options``.

    The dispatcher leaves out what equals the schema's default.
    """
    others = dict(given)
    options = Options(**{name: others.pop(name) for name in Options._fields if name in given})
    return {"options": options, **others}
