"""The loss over a split vocabulary in real processes. Every rank runs the cases of the *_cases.py files beside this."""

import dtensor_cases as dtensor
import dtensor_mesh_cases as dtensor_mesh
import pytest
import torch
import vocab_parallel_cases as cases
import vocab_parallel_compiled_cases as compiled
import vocab_parallel_error_cases as errors
from helpers.workers import Workers
from worlds import each, every_kind_and_dtype

WORLDS = [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
QUICK = [2, pytest.param(8, marks=pytest.mark.slow)]  # what no third rank changes; 8 are for GPUs
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("world, kind, dtype", every_kind_and_dtype(WORLDS, DTYPES))
def test_values(pool, device, world, kind, dtype):
    pool(world, device).run(cases.values, kind, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_through_the_dispatcher(pool, device, dtype):
    pool(2, device).run(cases.values_through_the_dispatcher, "uneven", dtype)


@pytest.mark.parametrize("world", QUICK)
@each(
    cases.one_node,
    cases.batch_of_upstream_gradients,
    cases.integers_of_other_types,
    cases.rows_match_the_oracle_closely,
    cases.edge_rows,
    cases.fewer_classes_than_ranks,
    cases.collectives,
    cases.groups,
    errors.bad_input,
    errors.shards_that_do_not_tile,
    errors.check_across_ranks,
    errors.check_raises_on_every_rank,
    errors.check_of_numbers_of_other_types,
    cases.one_rank_holds_every_class,
)
def test_behaviour(pool, device, world, case):
    pool(world, device).run(case)


@pytest.mark.slow
def test_meshes_of_two_dimensions(pool, device):
    pool(4, device).run(cases.groups)


@pytest.mark.parametrize("world", QUICK)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(pool, device, world, backend):
    if backend == "inductor" and world > 2 and device == "cpu":
        pytest.skip("every rank compiles what two compile")
    pool(world, device).run(compiled.equal_to_eager, backend)


@each(compiled.graph, compiled.lowered_for_inductor, compiled.bad_input_while_tracing)
def test_tracing(pool, device, case):
    pool(2, device).run(case)


def test_dtensors_of_groups_made_again(device):
    workers = Workers(2, device)
    try:
        workers.run(dtensor.groups_made_again)
    finally:
        workers.close()


@pytest.mark.gpu
@pytest.mark.parametrize("world", WORLDS)
@each(compiled.cuda_graph_of_a_step, compiled.cuda_graphs_of_inductor)
def test_cuda_graphs(pool, world, case):
    pool(world, "cuda").run(case)


@pytest.mark.parametrize("world", [world for world in WORLDS if world != 3])
@each(
    dtensor.placements_of_logits,
    dtensor.one_node,
    dtensor.other_layouts,
    dtensor.refused_in_backward,
    dtensor.loss_without_a_gradient,
    dtensor.log_probs,
    dtensor.without_gradients,
    dtensor.rows_of_this_rank,
    dtensor.what_is_communicated,
    dtensor.colwise_parallel,
    dtensor.refused,
    dtensor_mesh.ranks_outside_of_a_mesh,
    dtensor_mesh.dimension_of_one_rank,
    dtensor_mesh.words,
)
def test_dtensor(pool, device, world, case):
    pool(world, device).run(case)
