"""Pipeline and context parallel, by torch's own means, with our loss at the end; in real processes."""

import parallel_trainer_cases as cases
import pytest

WORLDS = [2, pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", [cases.pipeline, cases.context_parallel], ids=lambda case: case.__name__)
def test_a_step(pool, device, world, case):
    pool(world, device).run(case)
