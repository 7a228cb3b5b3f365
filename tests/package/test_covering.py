"""The cases that the interpreter is left with."""

import itertools

from helpers.covering import pairs


def test_any_two_values_meet():
    axes = ("abcd", [{}, {"x": 1}, {"x": 2}], [False, True])
    cases = pairs(*axes)
    for i, j in itertools.combinations(range(3), 2):
        assert {(str(case[i]), str(case[j])) for case in cases} == {
            (str(one), str(other)) for one in axes[i] for other in axes[j]
        }
    assert len(cases) == 12 < 4 * 3 * 2
