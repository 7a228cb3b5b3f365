"""The head and the loss as one in Inductor's code: the one pass runs once, and its gradients are scaled in place."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.graphs import Partitioned, operator_names
from linear_cases import IN_PLACE, ONE_PASS, SCALED, code_of, counts, gradients, inputs, loss
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from xent_ops.inductor.lowerings import save


def after_pointwise(x, w, b, target):
    """Something that a partitioner likes to make again."""
    return loss((x * 2).sin(), w.cos(), b, target)


def after_products(x, w, b, target):
    return loss(((x @ w.T).sin() @ w).cos(), w, b, target)


def in_a_checkpoint(*tensors):
    return checkpoint(after_pointwise, *tensors, use_reentrant=False)


def _recompute_all(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


def in_a_selective_checkpoint(*tensors):
    contexts = partial(create_selective_checkpoint_contexts, _recompute_all)
    return checkpoint(after_pointwise, *tensors, use_reentrant=False, context_fn=contexts)


# The function, and the setting of torch._functorch.config below which torch would run the one pass again.
TWICE = [
    (in_a_checkpoint, None),
    (in_a_selective_checkpoint, None),
    (after_pointwise, ("activation_memory_budget", 0.3)),
    (after_products, ("activation_memory_budget", 0.3)),
    (after_products, ("activation_memory_budget", 0.0)),
    (after_products, ("aggressive_recomputation", True)),
]


def _name(case):
    return case.__name__ if callable(case) else "-".join(map(str, case or ("default",)))


def graphs_of(function, setting, device="cpu"):
    """Those that Inductor's partitioner makes, right in their numbers."""
    tensors, backend = inputs(device=device), Partitioned()
    with config.patch(**dict([setting] if setting else [])):
        made = gradients(torch.compile(function, fullgraph=True, backend=backend), tensors)
    torch.testing.assert_close(made, gradients(function, tensors))
    return backend


@pytest.mark.parametrize("function, setting", [(after_pointwise, None), *TWICE], ids=_name)
def test_the_with_grad_runs_once(device, function, setting):
    assert graphs_of(function, setting, device).calls(ONE_PASS) == [1, 0]


@pytest.mark.parametrize("function, setting", TWICE, ids=_name)
def test_without_the_marks_it_runs_twice(monkeypatch, function, setting):
    """That the test above can fail."""
    monkeypatch.setattr(save.SaveGradients, "apply", lambda self, graph: 0)
    assert graphs_of(function, setting).calls(ONE_PASS) == [1, 1]


def test_a_budget_still_counts_for_the_rest_of_a_graph():
    products = [
        operator_names(graph).count("aten.mm.default")
        for budget in (1.0, 0.0)
        for graph in graphs_of(after_products, ("activation_memory_budget", budget)).graphs
    ]
    assert products[0] == products[2] and products[1] < products[3], "made again in the backward"


@pytest.mark.parametrize("setting", [None, ("activation_memory_budget", 0.3)], ids=_name)
def test_inductor_takes_the_marked_graphs(device, setting):
    """With a budget too that finds nothing else to make again: torch 2.13 would save a tuple, and fail."""
    function = in_a_checkpoint if setting is None else after_pointwise
    with config.patch(**dict([setting] if setting else [])):
        code, _ = code_of(function, *inputs(device=device))
    assert counts(code, ONE_PASS) == (1,)


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="torch 2.13 has it")
def test_the_budget_of_a_region_stands():
    """It is above any that the marks need, so there are none: docs/compile.md says that the one pass may run twice."""

    def function(*tensors):
        with (
            torch.autograd.graph.region_activation_memory_budget(0.3)
            if torch.compiler.is_compiling()
            else nullcontext()
        ):
            return after_pointwise(*tensors)

    code, _ = code_of(function, *inputs())
    assert counts(code, ONE_PASS) == (2,)


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def twice(*tensors):
    value = loss(*tensors)
    return value * 2 + value**2


def two_losses(x, w, b, target):
    return loss(x, w, b, target) + loss(x, w, b, target.flip(0), label_smoothing=0.1)


def _scaled():
    for function, calls in ((loss, 1), (twice, 1), (two_losses, 2)):
        for dtype in DTYPES:
            quick = dtype == torch.float32 or (function, dtype) == (two_losses, torch.bfloat16)
            marks = () if quick else pytest.mark.slow
            yield pytest.param(function, calls, dtype, id=f"{function.__name__}-{dtype}", marks=marks)


@pytest.mark.parametrize("function, calls, dtype", _scaled())
def test_gradients_are_scaled_in_place(device, dtype, function, calls):
    """What the forward has made is the result of the backward: no second buffer of the head's size."""
    tensors = inputs(dtype, device)
    code, compiled = code_of(function, *tensors)
    assert counts(code, ONE_PASS, IN_PLACE, SCALED) == (calls, calls * 3, 0)
    wanted = gradients(function, tensors)
    for _ in range(3):
        torch.testing.assert_close(gradients(compiled, tensors), wanted)


def test_an_upstream_gradient_of_zero(device):
    tensors = inputs(device=device)
    compiled = torch.compile(lambda *tensors: loss(*tensors) * 0.0, fullgraph=True)
    _, grads = gradients(compiled, tensors)
    assert all(grad.count_nonzero() == 0 for grad in grads)


@pytest.mark.parametrize("dtype, options", [(torch.float16, {}), (torch.bfloat16, {"accumulate_dtype": torch.float32})])
def test_gradients_that_were_added_up_in_float32(device, dtype, options):
    """Scaled as they are, and rounded once."""
    tensors = inputs(dtype, device)
    code, _ = code_of(lambda *tensors: loss(*tensors, **options), *tensors)
    assert counts(code, IN_PLACE, SCALED) == (3, 0)


def test_without_donated_buffers_nothing_is_written_over():
    with config.patch(donated_buffer=False):
        code, compiled = code_of(loss, *(tensors := inputs()))
        assert counts(code, IN_PLACE, SCALED) == (0, 3)
        wanted = gradients(loss, tensors)[1]
        value = compiled(*tensors) * 3.0
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(value, tensors[:3], retain_graph=True), wanted)


def test_the_same_loss_made_twice_is_one(device):
    """The partitioner makes equal computations one. Then two scales read one gradient, and neither writes."""

    def function(*tensors):
        return loss(*tensors) + 2 * loss(*tensors).square()

    code, compiled = code_of(function, *(tensors := inputs(device=device)))
    assert counts(code, ONE_PASS, IN_PLACE, SCALED) == (1, 0, 6)
    torch.testing.assert_close(gradients(compiled, tensors), gradients(function, tensors))
