"""Fewer cases than all combinations, where a case takes long."""

import itertools

from helpers.interpreter import INTERPRETED


def pairs(*axes):
    """Combinations in which any two values of two axes meet: a mistake that takes three options is not looked for."""
    combinations = list(itertools.product(*map(list, axes)))
    places = list(itertools.combinations(range(len(axes)), 2))

    def met(combination):
        return {(i, j, str(combination[i]), str(combination[j])) for i, j in places}

    chosen, seen = [], set()
    while combinations:
        best = max(combinations, key=lambda combination: len(met(combination) - seen))
        if met(best) <= seen:
            break
        chosen.append(best)
        seen |= met(best)
        combinations.remove(best)
    return chosen


def pairs_if_interpreted(*axes):
    """In Triton's interpreter, which takes .1 s a launch (2026-11-24); all combinations elsewhere."""
    return pairs(*axes) if INTERPRETED else list(itertools.product(*map(list, axes)))
