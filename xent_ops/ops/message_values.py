"""Formats values for error messages, without memory addresses."""

from __future__ import annotations

from typing import Any

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def repr_for_message(value: Any) -> str:
    """A constant as Python writes it, a function by its name, anything else by its type."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    if all([isinstance(item, _CONSTANTS) for item in values]):
        return repr(value)
    return getattr(value, "__qualname__", None) or type_name(value)


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
