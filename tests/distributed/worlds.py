"""Which kinds of split and which dtypes meet at which numbers of ranks."""

import pytest

KINDS = ["chunk", "uneven", "empty", "padded"]


def every_kind_and_dtype(worlds, dtypes):
    """Each kind with the first and one other dtype on two ranks, and with one of the next on more. With those that are
    slow, every kind meets every dtype: how many ranks there are changes no arithmetic of a rank."""
    cases = [(2, kind, dtypes[0]) for kind in KINDS]
    for step, world in enumerate(worlds):
        number, marks = (world, ()) if isinstance(world, int) else (world.values[0], world.marks)
        for place, kind in enumerate(KINDS):
            dtype = dtypes[(place + step) % len(dtypes)]
            if (number, kind, dtype) not in cases:
                cases.append(pytest.param(number, kind, dtype, marks=marks) if marks else (number, kind, dtype))
    return cases
