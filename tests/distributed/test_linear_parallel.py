"""The head and the loss over ranks in real processes. Every rank runs the cases of linear_*cases.py beside this."""

import batch_invariant_cases as batch_invariant
import bench_cases as bench
import distillation_cases as distillation
import distillation_token_cases as distillation_token
import linear_compiled_cases as compiled
import linear_dtensor_cases as dtensor
import linear_error_cases as errors
import linear_few_classes_cases as few_classes
import linear_float16_cases as float16
import linear_log_prob_cases as log_probs
import linear_parallel_cases as cases
import linear_precision_cases as precision
import linear_token_loss_cases as token_loss
import linear_top_k_cases as top_k
import offset_cases as offsets
import pytest
import token_divergences_cases as token_divergences
import torch
from worlds import KINDS, each, every_kind_and_dtype

WORLDS = [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
QUICK = [2, pytest.param(8, marks=pytest.mark.slow)]  # what no third rank changes; 8 are for GPUs
FEW = [2, pytest.param(3, marks=pytest.mark.slow)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("world, kind, dtype", every_kind_and_dtype(WORLDS, DTYPES))
def test_values(pool, device, world, kind, dtype):
    pool(world, device).run(cases.values, kind, dtype)


@pytest.mark.parametrize("world", QUICK)
@each(
    cases.sequence_parallel,
    cases.losses_and_their_sum,
    cases.what_is_communicated,
    cases.flops,
    cases.groups_of_one_and_some,
    cases.edge_rows,
    cases.exact_numbers,
    cases.backward_again,
    cases.batch_of_upstream_gradients,
    cases.checkpoint,
    cases.autocast,
    float16.rows_that_weigh_little,
    float16.no_collective_more,
    errors.bad_input,
    errors.check_across_ranks,
    errors.check_of_the_split_dimension,
)
def test_behaviour(pool, device, world, case):
    pool(world, device).run(case)


# Who joins more than two ranks' statistics is the same for all losses: test_values has three in each run.
@pytest.mark.parametrize("world", FEW)
@pytest.mark.parametrize("kind", KINDS)
@each(
    log_probs.values,
    token_loss.values,
    distillation.values,
    distillation_token.values,
    token_divergences.values,
    few_classes.values,
    top_k.values,
)
def test_values_of_other_losses(pool, device, world, kind, case):
    pool(world, device).run(case, kind)


@pytest.mark.parametrize("world", FEW)
@each(
    log_probs.behaviour,
    token_loss.behaviour,
    token_loss.of_dtensors,
    distillation.sequence_parallel,
    distillation.masks_and_edges,
    distillation.ignored_rows_of_nan,
    distillation.behaviour,
    distillation.errors,
    distillation_token.behaviour,
    distillation_token.draft_vocabulary,
    token_divergences.behaviour,
    token_divergences.rows_of_float16,
    token_divergences.near_teacher,
    offsets.losses,
    few_classes.without_gradients_and_errors,
    top_k.sequence_parallel,
    top_k.behaviour,
    precision.float32_logits,
    precision.eight_bits,
)
def test_behaviour_of_other_losses(pool, device, world, case):
    pool(world, device).run(case)


@pytest.mark.parametrize("world", FEW)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(pool, device, world, backend):
    if backend == "inductor" and world > 2 and device == "cpu":
        pytest.skip("every rank compiles what two compile")
    pool(world, device).run(compiled.equal_to_eager, backend)
    if backend == "inductor":  # the cases of test_tracing have its graph
        pool(world, device).run(compiled.pipeline_equal_to_eager)


@each(
    compiled.graph,
    pytest.param(compiled.empty_shards, marks=pytest.mark.slow),
    pytest.param(compiled.empty_shards_by_aot_autograd, marks=pytest.mark.slow),
    pytest.param(distillation.graph, marks=pytest.mark.slow),
    pytest.param(distillation.any_number_of_rows, marks=pytest.mark.slow),
    pytest.param(distillation.inductor, marks=pytest.mark.slow),
    pytest.param(compiled.order_of_the_pipeline, marks=pytest.mark.slow),
    pytest.param(token_divergences.compiled, marks=pytest.mark.slow),
    compiled.bad_input_while_tracing,
    pytest.param(compiled.gradients_are_made_once_in_a_checkpoint, marks=pytest.mark.slow),
    pytest.param(compiled.gradients_are_made_once_in_other_checkpoints, marks=pytest.mark.slow),
    pytest.param(compiled.gradients_are_made_once, marks=pytest.mark.slow),
)
def test_tracing(pool, device, case):
    pool(2, device).run(case)


@each(pytest.param(bench.report, marks=pytest.mark.slow), bench.wrong_is_seen)
def test_bench(pool, device, case):
    pool(2, device).run(case)


@pytest.mark.gpu
@pytest.mark.parametrize("world", WORLDS)
@each(compiled.cuda_graph_of_a_step, compiled.cuda_graphs_of_inductor)
def test_cuda_graphs(pool, world, case):
    pool(world, "cuda").run(case)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@each(
    dtensor.placements,
    dtensor.targets,
    dtensor.token_weights,
    dtensor.log_probs,
    dtensor.other_products,
    dtensor.batch_invariant,
    dtensor.what_is_communicated,
    dtensor.parallel_styles,
    dtensor.written_in_place,
    dtensor.refused,
)
def test_dtensor(pool, device, world, case):
    pool(world, device).run(case)


@pytest.mark.parametrize("world", [2, 3])  # the sum of two has one order
@each(batch_invariant.own_bits, batch_invariant.sequence_parallel, batch_invariant.given_logits)
def test_batch_invariant(pool, device, world, case):
    pool(world, device).run(case)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_batch_invariant_compiled(pool, device, backend):
    pool(3, device).run(batch_invariant.compiled, backend)
