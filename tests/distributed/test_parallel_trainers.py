"""Pipeline and context parallel, by torch's own means, with our loss at the end; in real processes."""

import parallel_trainer_cases as cases
import pytest
from worlds import each

WORLDS = [2, pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world", WORLDS)
@each(cases.pipeline, cases.context_parallel)
def test_a_step(pool, device, world, case):
    pool(world, device).run(case)
