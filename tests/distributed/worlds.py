"""Which kinds of split and which dtypes meet at which numbers of ranks, and which cases a test runs."""

import pytest

KINDS = ["chunk", "uneven", "empty", "padded"]


def every_kind_and_dtype(worlds, dtypes):
    """(world, kind, dtype): each kind with the first dtype on two ranks, and with one of the others on each number of
    ranks, so that with four ranks, which are slow, every kind has met every dtype."""
    first, *others = dtypes
    cases = [(2, kind, first, ()) for kind in KINDS]
    for step, world in enumerate(worlds):
        number, marks = (world, ()) if isinstance(world, int) else (world.values[0], world.marks)
        cases += [(number, kind, others[(place + step) % len(others)], marks) for place, kind in enumerate(KINDS)]
    return [pytest.param(*case, id="-".join(map(str, case)), marks=marks) for *case, marks in cases]


def each(*cases):
    """The test runs once for each of these functions, which are called its ``case``."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: f"{case.__module__}.{case.__name__}")
