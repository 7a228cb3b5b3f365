"""What linear cross entropy refuses, and how it says so: on every way of a call, and as cross_entropy does."""

import inspect
import itertools

import numpy as np
import pytest
import torch
from helpers.refusals import refusals
from helpers.samples import contract_of

import xent_ops

ops = torch.ops.xent


def inputs(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, generator=generator).to(device, dtype).requires_grad_()
    head = torch.randn(9, 5, generator=generator).to(device, dtype).requires_grad_()
    return x, head, torch.tensor([3, 8, -100, 0, 7, 7], device=device)


# Ways of a call, each a function of (input, linear_weight, target, keywords).
WAYS = {
    "one pass": lambda x, w, t, **o: xent_ops.linear_cross_entropy(x, w, t, **o),
    "rows": lambda x, w, t, **o: xent_ops.linear_cross_entropy(x.detach(), w.detach(), t, **o),
    "outputs": lambda x, w, t, **o: xent_ops.linear_cross_entropy_outputs(x, w, t, **o),
    "log_probs": lambda x, w, t, **o: xent_ops.linear_token_log_probs(x, w, t, **o),
    "operator": lambda x, w, t, **o: ops.linear_cross_entropy(x, w, t, **o),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_refuses_what_the_operator_does(way):
    """Each argument that its contract refuses, by its name."""
    other = {"outputs": xent_ops.linear_cross_entropy_outputs, "log_probs": xent_ops.linear_token_log_probs}
    function, names = other.get(way, xent_ops.linear_cross_entropy), contract_of("linear_cross_entropy").arguments
    taken, refused = inspect.signature(function).parameters, set()
    for argument, sample, error, words in refusals("linear_cross_entropy"):
        given = dict(zip(names, sample.args, strict=False)) | sample.options
        x, head, target = (given.pop(name) for name in names[:3])
        if way == "one pass":  # with gradients, linear_cross_entropy_with_grad takes the call
            x, head = (one.detach().requires_grad_() if one.is_floating_point() else one for one in (x, head))
        options = {name: value for name, value in given.items() if value is not None and name in taken}
        if way == "log_probs" and argument == "target":
            continue  # one dimension more has several classes a row
        if argument in (*names[:3], *options):
            with pytest.raises(error, match=words):
                WAYS[way](x, head, target, **options)
            refused.add(argument)
    assert len(refused) >= 8, refused


@pytest.mark.parametrize("name", ["input", "linear_weight", "target", "linear_bias", "weight", "divisor"])
@pytest.mark.parametrize(
    "make, text",
    [
        (lambda x: x.to_sparse(), "has layout torch.sparse_coo; expected torch.strided"),
        (lambda x: torch.nested.as_nested_tensor([x]), "is a nested tensor"),
    ],
    ids=["sparse", "nested"],
)
def test_what_is_no_dense_tensor(name, make, text):
    x, head, target = inputs()
    given = {"input": x.detach(), "linear_weight": head.detach(), "target": target}
    given |= {"linear_bias": torch.ones(9), "weight": torch.ones(9), "divisor": torch.ones(1)}
    given[name] = make(given[name])
    with pytest.raises(TypeError, match=f"^{name} {text}"):
        if name == "divisor":
            ops.linear_cross_entropy(*given.values(), reduction="sum")
        else:
            del given["divisor"]
            xent_ops.linear_cross_entropy(**given)
    if name in ("input", "linear_weight", "target"):
        given[name] = None
        with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got None"):
            xent_ops.linear_cross_entropy(**given)


@pytest.mark.parametrize("way", ["one pass", "rows"])
def test_divisors(way):
    x, head, target = inputs()
    for divisor, error, text in (
        (torch.ones(6), ValueError, r"divisor has shape \(6,\); expected \(\), one number"),
        (torch.ones((), dtype=torch.int32), TypeError, "divisor has dtype torch.int32; expected one of float32"),
        (torch.ones((), device="meta"), RuntimeError, "divisor is on meta but input is on cpu"),
        ("3", TypeError, "divisor must be a number, got '3'"),
        (1j, TypeError, "divisor must be a number, got 1j"),
    ):
        with pytest.raises(error, match=f"^{text}"):
            WAYS[way](x, head, target, reduction="sum", divisor=divisor)
    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match=r'^divisor is what a sum is divided by: expected reduction="sum"'):
            WAYS[way](x, head, target, reduction=reduction, divisor=3.0)
    wanted = WAYS[way](x, head, target, reduction="sum") / 4
    for four in (4, 4.0, np.float32(4), torch.tensor(4), torch.tensor(4.0, dtype=torch.float64)):
        loss = WAYS[way](x, head, target, reduction="sum", divisor=four)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, wanted)


def test_a_divisor_that_requires_grad():
    """Refused where its derivative would be lost; where torch divides it has one."""
    x, head, target = inputs()
    divisor = torch.tensor(4.0, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^divisor requires grad, .*: detach it"):
        xent_ops.linear_cross_entropy(x, head, target, reduction="sum", divisor=divisor)
    with torch.no_grad():
        xent_ops.linear_cross_entropy(x, head, target, reduction="sum", divisor=divisor)
    loss = xent_ops.linear_cross_entropy(x.detach(), head.detach(), target, reduction="sum", divisor=divisor)
    torch.testing.assert_close(torch.autograd.grad(loss, divisor)[0], -loss.detach() / 4)


@pytest.mark.parametrize("bad", [9, -1, 2**40, -(2**62)])
def test_targets_out_of_range(device, raises_out_of_range, bad):
    """An IndexError on the CPU, in whichever chunk; elsewhere NaN in the row (test_linear_cuda.py)."""
    x, head, target = inputs(device=device)
    for row, reduction in itertools.product((0, 5), ("mean", "sum", "none")):
        wrong = target.clone()
        wrong[row] = bad
        if raises_out_of_range:
            for way in (WAYS["one pass"], WAYS["rows"]):
                with pytest.raises(
                    IndexError, match=f"target {bad} is out of bounds: valid are 0 to 8 and ignore_index=-100"
                ):
                    way(x, head, wrong, reduction=reduction, chunk_rows=2)
        else:
            assert WAYS["one pass"](x, head, wrong, reduction=reduction).isnan().any()
        # Not where that row is the ignored one.
        right = torch.where(target == -100, bad, target)
        mine = xent_ops.linear_cross_entropy(x, head, right, ignore_index=bad, reduction=reduction)
        wanted = xent_ops.linear_cross_entropy(x, head, target, reduction=reduction)
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_cross_entropy_outputs", "linear_token_log_probs"])
def test_class_probabilities(name):
    x, head, target = inputs()
    probabilities = torch.full((*target.shape, 9), 1 / 9)
    dtype = r"torch\.float32; expected one of int64"  # several classes a row have as many dimensions
    words = (
        rf"target has dtype {dtype}"
        if name == "linear_token_log_probs"
        else "need all logits. Call xent_ops.cross_entropy"
    )
    with pytest.raises(TypeError, match=words):
        getattr(xent_ops, name)(x, head, probabilities)
    with pytest.raises(TypeError, match=rf"target has dtype {dtype}"):
        getattr(xent_ops, name)(x, head, probabilities[:, 0])


def test_derivatives_that_there_are_not():
    x, head, target = inputs()
    with pytest.raises(RuntimeError, match=r"xent::linear_scale_grad has no derivative"):
        ops.linear_scale_grad(x, torch.ones(())).sum().backward()
    for name in ("linear_cross_entropy_forward", "linear_cross_entropy_with_grad"):
        with pytest.raises(RuntimeError, match="weight requires grad"):
            getattr(ops, name)(x, head, target, None, torch.ones(9, requires_grad=True))
