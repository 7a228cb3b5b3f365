"""The check of a line's loss and gradients: which errors it sees, and which rounding it allows."""

import math

import pytest
import torch
import torch.nn.functional as F
from probes import probe, setting

import xent_ops
from xent_ops.bench import check, contestants
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import Outputs
from xent_ops.bench.problems import Head, Loss


def right(problem, outputs, one):
    return not check.wrong(problem.check(outputs, one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "damage",
    [
        lambda loss, grad, target: loss.mul_(1.05),
        lambda loss, grad, target: grad.mul_(1.05),
        lambda loss, grad, target: grad[20].mul_(1.1),  # one row
        lambda loss, grad, target: grad[5].scatter_(0, target[5:6], 0.0),  # one target
        lambda loss, grad, target: grad[16].add_(1e-30),  # an ignored row
        lambda loss, grad, target: grad[3, 3].fill_(math.nan),
        lambda loss, grad, target: grad.copy_(grad.roll(1, 0)),
    ],
    ids=["loss", "scale", "row", "target", "ignored", "nan", "shifted"],
)
def test_the_check_sees(damage, dtype, monkeypatch):
    problem, one = Loss(Shape(34, 64), setting(dtype)), probe(contestants.torch_loss_upcast)
    good = problem.bind(one)()
    whole = problem.check(good, one)
    bad = Outputs(good.loss.clone(), (good.grads[0].clone(),))
    damage(bad.loss, bad.grads[0], problem.target)
    assert not check.wrong(whole) and not right(problem, bad, one)
    monkeypatch.setattr(check, "CHUNK", {"cpu": 5 * 64})
    parts = problem.check(good, one)
    assert not check.wrong(parts) and math.isclose(whole["gradient"][0], parts["gradient"][0])


@pytest.mark.parametrize("weighted", [False, True])
def test_terms_that_cancel_are_no_error(weighted):
    """p_j - e/V of two classes is nearly zero in some rows of many. The check still sees errors of 1e-4."""
    options = {"label_smoothing": 0.1, **({"weight": True} if weighted else {})}

    def loss(logits, target, weight=None):
        return F.cross_entropy(logits, target, weight, label_smoothing=0.1)

    problem, one = Loss(Shape(20000, 2), setting()), probe(loss, options=options)
    good = problem.bind(one)()
    assert right(problem, good, one)
    bad = good.grads[0].clone()
    off_target = bad.scatter(1, problem.target.clamp(min=0)[:, None], 0.0).abs()
    row = int(off_target.amax(1).argmax())
    for place in (off_target[row].argmax(), problem.target[row]):
        wrong = bad.clone()
        wrong[row, place] *= 1 + 1e-4
        assert not right(problem, Outputs(good.loss, (wrong,)), one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "damage",
    [
        lambda loss, hidden, matrix: loss.mul_(1.02),
        lambda loss, hidden, matrix: hidden.mul_(1.05),
        lambda loss, hidden, matrix: hidden[20].mul_(1.5),  # one row
        lambda loss, hidden, matrix: hidden[16].add_(1e-30),  # an ignored row
        lambda loss, hidden, matrix: matrix.mul_(1.05),
        lambda loss, hidden, matrix: matrix[3, 3].fill_(math.nan),
    ],
    ids=["loss", "hidden", "row", "ignored", "matrix", "nan"],
)
def test_the_check_of_a_head_sees(damage, dtype):
    problem, one = Head(Shape(34, 64), 16, setting(dtype)), probe(contestants.unfused_torch)
    good = problem.bind(one)()
    assert right(problem, good, one)
    assert right(problem, Outputs(good.loss, ()), one)  # a forward alone
    bad = Outputs(good.loss.clone(), tuple(grad.clone() for grad in good.grads))
    damage(bad.loss, *bad.grads)
    assert not right(problem, bad, one)


def test_the_reference_of_a_head(monkeypatch):
    """By chunks as at once; targets and options are told apart."""
    problem = Head(Shape(34, 64), 16, setting())
    whole = problem.expected({})
    problem.use_targets(1)
    assert not torch.allclose(problem.expected({}).matrix, whole.matrix)
    problem.use_targets(0)
    assert problem.expected({}) is whole
    assert not torch.allclose(problem.expected({"softcap": 2.0}).matrix, whole.matrix)
    loss = probe(lambda x, w, t: xent_ops.cross_entropy(x @ w.T, t, softcap=2.0), options={"softcap": 2.0})
    assert right(problem, problem.bind(loss)(), loss)
    monkeypatch.setattr(check, "CHUNK", {"cpu": 5 * 64})
    problem._expected.clear()
    for one, other in zip(whole, problem.expected({}), strict=True):
        torch.testing.assert_close(one, other)
