"""DDP and FSDP2 with a compiled model in two real processes. The case, run on every rank, is data_parallel_cases.py's."""

import data_parallel_cases as cases
import fsdp_linear_cases as fsdp
import pytest
from worlds import each

CASES = [(way, "aot_eager") for way in cases.WAYS]
CASES.append(pytest.param("DDP of compiled", "inductor", marks=pytest.mark.slow))


# The ways are those of test_the_head_and_the_loss_as_one; this counts graphs too.
QUICK = ("compiled FSDP",)


@pytest.mark.parametrize(
    "way, backend",
    [*CASES[-1:], *(pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in CASES[:-1])],
)
def test_equal_to_one_process(pool, device, way, backend):
    pool(2, device).run(cases.equal_to_one_process, way, backend)


@pytest.mark.parametrize("way, backend", [*((way, None) for way in cases.EAGER), *CASES])
def test_the_head_and_the_loss_as_one(pool, device, way, backend):
    pool(2, device).run(cases.linear_head, way, backend)


@each(
    fsdp.collectives,
    fsdp.accumulation_without_sync,
    fsdp.mixed_precision,
    fsdp.tied_embedding,
    fsdp.outside_of_its_module,
)
def test_fsdp_of_the_head_and_the_loss(pool, device, case):
    pool(2, device).run(case)


@pytest.mark.slow
@each(fsdp.hybrid_sharding, fsdp.tensor_parallel)
def test_meshes_of_two_dimensions(pool, device, case):
    pool(4, device).run(case)
