"""Draws on the ranks of a process group, which draw alike; run on every rank by test_fuzz.py."""

import torch
import torch.distributed as dist
from fuzz_draws import OVER_RANKS, draw
from fuzz_program import failure_of


def run(device, first, number):
    """Raises on all ranks, so that none waits for another, with the program and what one of them found."""
    for seed in range(first, first + number):
        one = draw(seed, device=device, names=OVER_RANKS, ranks=dist.get_world_size())
        failure = failure_of(one)
        failed = torch.tensor(int(failure is not None), device=device)
        dist.all_reduce(failed)
        if failure is not None:
            raise AssertionError(failure)
        if failed:
            raise AssertionError(f"another rank failed in draw {seed}")
