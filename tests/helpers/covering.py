"""Fewer cases than all combinations, where a case takes long."""

import itertools

import torch
from helpers.interpreter import INTERPRETED


def pairs(*axes, but=lambda *values: False):
    """Combinations in which any two values of two axes meet: a mistake that takes three options is not looked for.
    ``but``: of those that none may be."""
    combinations = [values for values in itertools.product(*map(list, axes)) if not but(*values)]
    places = list(itertools.combinations(range(len(axes)), 2))

    def met(combination):
        return {(i, j, str(combination[i]), str(combination[j])) for i, j in places}

    return fewest(combinations, met)


def fewest(cases, has):
    """Cases that have together what all have. ``has``: the set of what one has."""
    cases, chosen, seen = list(cases), [], set()
    left = list(map(has, cases))
    while left:
        best = max(range(len(left)), key=lambda place: len(left[place] - seen))
        if left[best] <= seen:
            break
        chosen.append(cases.pop(best))
        seen |= left.pop(best)
    return chosen


def covering(*axes, but=lambda *values: False):
    """All combinations where there is a GPU, whose launches are fast and choose their kernels by several options at
    once. Pairs elsewhere: Triton's interpreter takes .1 s a launch (2026-11-24), and three options that are wrong together
    are left to tests/fuzz. ``but``: of what takes too long there."""
    launches = torch.cuda.is_available() and not INTERPRETED
    return list(itertools.product(*map(list, axes))) if launches else pairs(*axes, but=but)
