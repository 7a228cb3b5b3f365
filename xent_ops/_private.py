"""Private names of torch. If a version lacks one, a substitute is used, with one warning per process and name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

LEFT_OUT: dict[str, str] = {}  # missing feature -> its cost, for doctor


def left_out(what: str, cost: str, error: object) -> None:
    """Warn once that ``what`` is left out because of ``error``."""
    if what not in LEFT_OUT:
        LEFT_OUT[what] = cost
        warnings.warn(
            f"xent_ops leaves out {what}, which torch {torch.__version__} does not serve ({error}): {cost}. "
            "A newer xent_ops may know this torch.",
            RuntimeWarning,
            stacklevel=3,
        )


def private(name: str, otherwise: Any, cost: str) -> Any:
    """The object with this full name in torch, or ``otherwise`` if torch does not have it."""
    found: Any = torch
    try:
        for part in name.split(".")[1:]:
            found = getattr(found, part)
    except AttributeError as error:
        left_out(name, cost, error)
        return otherwise
    return found


def unless_gone(
    what: str, cost: str, otherwise: Callable[..., Any], errors: tuple[type[Exception], ...] = ()
) -> Callable[[Any], Any]:
    """A decorator. If the function meets a missing name, ``otherwise`` gets the same arguments and returns the result.

    ``errors``: further exceptions that show that a name has another meaning.
    """

    expected: tuple[type[Exception], ...] = (ImportError, AttributeError, *errors)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **keywords: Any) -> Any:
            try:
                return function(*args, **keywords)
            except expected as error:
                left_out(what, cost, error)
                return otherwise(*args, **keywords)

        return guarded

    return decorate
