"""The recipe of verl has the interface that verl 0.9 calls, seen here without verl, which does not install beside
transformers 5.11 and newer: names, order and defaults of arguments, shapes and dtypes of results. Where verl is
installed, test_examples.py compares with its own functions."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

FOLDER = Path(__file__).parents[2] / "examples" / "integrations"
B, S, H, V = 2, 5, 16, 40


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("verl_log_probs", FOLDER / "verl_log_probs.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("common", None)
    return module


def arguments(function):
    return [(one.name, one.default) for one in inspect.signature(function).parameters.values()]


def problem(dtype=torch.float32):
    hidden = torch.randn(B, S, H).to(dtype).requires_grad_()
    weight = torch.randn(V, H).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (B, S))


def plain(hidden, weight, ids, temperature):
    log_probs = ((hidden.float() @ weight.float().T) / temperature).log_softmax(-1)
    return log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def gradients(values, tensors):
    return torch.autograd.grad(values[0].square().sum() + 0.3 * values[1].sum(), tensors)


def test_the_module(recipe):
    """Called by keywords, on (B, S) and on packed (1, tokens)."""
    empty = inspect.Parameter.empty
    assert [name for name, _ in arguments(recipe.XentFusedLinearForPPO)][:2] == ["chunk_size", "impl_backend"]
    assert arguments(recipe.XentFusedLinearForPPO.forward)[1:] == [
        ("hidden_states", empty), ("vocab_weights", empty), ("input_ids", empty), ("temperature", 1.0),
    ]  # fmt: skip
    fused = recipe.XentFusedLinearForPPO(chunk_size=512, impl_backend="torch")
    hidden, weight, ids = problem()
    for shape in ((B, S), (1, B * S)):
        given = (hidden.view(*shape, H), weight, ids.view(shape))
        values = fused(hidden_states=given[0], vocab_weights=weight, input_ids=given[2], temperature=0.7)
        expected = plain(*given, 0.7)
        assert [tuple(value.shape) for value in values] == [shape, shape]
        assert_close(values, expected)
        assert_close(gradients(values, (hidden, weight)), gradients(expected, (hidden, weight)), rtol=1e-5, atol=2e-4)


def test_dtypes_of_the_module(recipe):
    hidden, weight, ids = problem(torch.bfloat16)
    log_probs, entropy = recipe.XentFusedLinearForPPO()(hidden, weight, ids)
    assert log_probs.dtype == torch.float32 and entropy.dtype == torch.bfloat16
    exact = recipe.XentFusedLinearForPPO(logits_dtype=torch.float32)(hidden, weight, ids)[0]
    assert_close(exact, plain(hidden, weight, ids, 1.0)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [False, True], ids=["alone", "group"])
def test_the_function(recipe, ranks):
    """Called by position, as an autograd.Function's ``apply`` is."""
    names = ["hidden", "weight", "labels", "temperature", "reduction", "dist_process_group"]
    assert [name for name, _ in arguments(recipe.linear_cross_entropy)] == names
    hidden, weight, ids = problem()
    if ranks:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD if ranks else None
        values = recipe.linear_cross_entropy(hidden, weight, ids, 0.7, "none", group)
        found = gradients(values, (hidden, weight))
    finally:
        if ranks:
            dist.destroy_process_group()
    assert [tuple(value.shape) for value in values] == [(B * S,), (B * S,)]
    expected = [value.flatten() for value in plain(hidden, weight, ids, 0.7)]
    assert_close(list(values), expected)
    assert_close(found, gradients(expected, (hidden, weight)), rtol=1e-5, atol=2e-4)
    with pytest.raises(NotImplementedError, match="verl asks for reduction='none', got 'mean'"):
        recipe.linear_cross_entropy(hidden, weight, ids, 0.7, "mean")
